"""A run's directory as a reader sees it, while it is written or after: records, evaluations, ledger, samples.

Nothing here writes or locks: looking at a run must not disturb it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlx.metrics.jsonl import read_json, read_jsonl
from rlx.metrics.ledger import Ledger
from rlx.metrics.rundir import LOCK, STOPPED

Record = dict[str, Any]


class NotARun(ValueError):
    """A path that is no run's directory, or one that has nothing to show yet."""


class RunView(NamedTuple):
    """What a run has written so far."""

    path: Path
    config: Record  # nested, as config.json has it: possibly of another version of the program
    updates: list[Record]  # metrics, one record an update
    evaluations: dict[str, Record]  # label -> metrics, in the order they were made
    supervised: list[Record]  # metrics, one record a supervised step
    ledger: Ledger | None
    summary: Record | None  # of a run that came to its end
    writer: str | None  # the process that writes it now
    stopped: Record | None  # kind and reason of the error that ended it

    @property
    def state(self) -> str:
        """complete, running or stopped. A run that goes on removes its summary first."""
        return "complete" if self.summary is not None else "running" if self.writer else "stopped"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(update, value) of a metric, where it was recorded and is finite."""
        values = ((record["update"], number(record.get(name))) for record in self.updates)
        return [(update, value) for update, value in values if math.isfinite(value)]


def read_run(path: Path) -> RunView:
    """The run in `path`.

    Raises:
      NotARun: no such directory, or no run in it; names the nearest run.
      ValueError: for a file that is damaged; names it.
    """
    _check_is_run(path)
    records = read_jsonl(path / "metrics.jsonl")[0] if (path / "metrics.jsonl").is_file() else []
    ledger = Ledger()
    if (path / "ledger.json").is_file():
        ledger.set_state(_json(path / "ledger.json"))
    return RunView(
        path=path,
        config=_json(path / "config.json"),
        updates=[r for r in records if "label" not in r and "step" not in r],
        evaluations={r["label"]: r for r in records if "label" in r},
        supervised=[r for r in records if "step" in r],
        ledger=ledger if (path / "ledger.json").is_file() else None,
        summary=_json(path / "summary.json") if (path / "summary.json").is_file() else None,
        writer=_writer(path),
        stopped=_json(path / STOPPED) if (path / STOPPED).is_file() else None,
    )


def read_samples(path: Path) -> Iterator[Record]:
    """The records of a run's samples.jsonl, one at a time: the file may be larger than memory.

    A torn last line, of a run that is being written or was killed, is left out.

    Raises:
      ValueError: for a damaged line before the last.
    """
    file = path / "samples.jsonl"
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for at, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{file}:{at}: not a JSON object: the file is damaged ({error})") from error
            yield record


def number(value: Any) -> float:
    """A recorded number; NaN where there is none. Numbers that JSON lacks were written as texts."""
    return math.nan if value is None else float(value)


def runs_below(directory: Path) -> list[Path]:
    """The runs directly in a directory, by name."""
    if not directory.is_dir():
        return []
    return sorted(child for child in directory.iterdir() if _is_run(child))


def setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where the run's version did not have it."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_run(path: Path) -> bool:
    """A model's directory has a config.json, too, but not with a run in it."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        config = read_json(file)
    except ValueError:
        return (path / "metrics.jsonl").is_file()
    return isinstance(config, dict) and isinstance(config.get("run"), dict)


def _check_is_run(path: Path) -> None:
    if _is_run(path):
        return
    if (path / LOCK).is_file() and (writer := _writer(path)):
        raise NotARun(f"{path}: the run is just starting ({writer} loads its parts): there is nothing to show yet")
    below, beside = [p.name for p in runs_below(path)], [p.name for p in runs_below(path.parent)]
    if below:
        raise NotARun(f"{path} holds runs and is none itself; name one of them: {_some(path, below)}")
    why = "is no directory of a run: it has no config.json of one" if path.is_dir() else "does not exist"
    close = difflib.get_close_matches(path.name, beside, n=1)
    if close:
        raise NotARun(f"{path} {why}; the nearest run is {path.parent / close[0]}")
    there = f"; there are {_some(path.parent, beside)}" if beside else "; a run's directory is runs/NAME"
    raise NotARun(f"{path} {why}{there}")


def _some(directory: Path, names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(str(directory / name) for name in names[:most]) + more


def _json(file: Path) -> Record:
    try:
        value = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}): the file is damaged") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: not a JSON object: the file is damaged")
    return value


def _writer(path: Path) -> str | None:
    """What the lock file says, where that process may still live. Trying the lock itself could be in a run's way."""
    file = path / LOCK
    words = file.read_text().split() if file.is_file() else []
    if len(words) != 4 or not words[1].isdigit():
        return None
    process, host = int(words[1]), words[3]
    if host != socket.gethostname():
        return None
    return f"process {process}" if _alive(process) else None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
