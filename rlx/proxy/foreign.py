"""Runs of other stacks: TensorBoard event folders, CSV and JSONL exports, through a small mapping file.

The mapping is JSON; every key but `metrics` may be left out:

    {
      "metrics": {"reward/mean": "train/reward", "eval/pass_rate": "val/accuracy"},   rlx's name -> theirs
      "step": "step",                 the column of the update (TensorBoard: the event's own step)
      "seconds": "_runtime",          of the wall time in seconds (TensorBoard: the event's own)
      "tokens": "tokens_seen",        the column or tag of all tokens generated so far
      "run": "run_name",              the column that tells the runs of one file apart
      "eval_attempts": 160, "eval_tasks": 20,      what an evaluation's interval is computed from
      "model": "their-7b",            the model's name
      "runs": {"run-a": {"settings": {"learning_rate": 1e-4}, "seed": 0}}
    }
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from rlx.config.errors import nearest
from rlx.metrics.jsonl import read_json, read_jsonl
from rlx.metrics.names import check_names
from rlx.metrics.view import runs_below
from rlx.proxy.runs import Point, RunData, evaluation_of, read_rlx, rlx_runs

Row = Mapping[str, Any]


class MappingError(ValueError):
    """A mapping file that is missing, malformed, or names what an export does not have."""


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A mapping file; see the module's docstring."""

    metrics: Mapping[str, str]
    step: str = "step"
    seconds: str = ""
    tokens: str = ""
    run: str = ""
    eval_attempts: float = math.nan
    eval_tasks: float = math.nan
    model: str = ""
    runs: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


def read_mapping(path: Path) -> Mapped:
    """Raises MappingError for a file that is missing or malformed, or a metric that rlx does not have."""
    if not path.is_file():
        raise MappingError(f"{path}: there is no such mapping file")
    try:
        tree = read_json(path)
    except ValueError as error:
        raise MappingError(f"{path}: not JSON ({error})") from error
    known = [field.name for field in dataclasses.fields(Mapped)]
    if not isinstance(tree, dict) or not isinstance(tree.get("metrics"), dict):
        raise MappingError(f'{path}: needs an object with "metrics": {{"reward/mean": "their name", ...}}')
    for key in tree:
        if key not in known:
            close = nearest(key, known)
            raise MappingError(f"{path}: unknown key {key!r}; " + (f"did you mean {close!r}?" if close else f"{known}"))
    try:
        check_names(tree["metrics"])
    except ValueError as error:
        raise MappingError(f"{path}: {error}") from error
    return Mapped(**tree)


def is_foreign(path: Path) -> bool:
    """Whether it is an export or a folder of event files, and not rlx's own."""
    return path.suffix in (".csv", ".jsonl") or bool(list(_event_folders(path)))


def read_runs(path: Path, mapping: Mapped | None = None) -> list[RunData]:
    """The run or runs in `path`: of rlx (a run's directory or a directory of runs) or of another stack.

    Raises what `read_run` and `read_foreign` do.
    """
    if not runs_below(path) and not (path / "config.json").is_file() and is_foreign(path):
        return read_foreign(path, mapping)
    return [read_rlx(run) for run in rlx_runs(path)]


def read_foreign(path: Path, mapping: Mapped | None) -> list[RunData]:
    """The runs of an export.

    Raises:
      MappingError: without a mapping for CSV or JSONL, or where it names what is not there; says what is.
    """
    if path.is_dir():
        return [_from_events(folder, path, mapping) for folder in _event_folders(path)]
    if mapping is None:
        raise MappingError(f"{path}: a CSV or JSONL export needs a mapping file: give --mapping FILE")
    rows = _csv(path) if path.suffix == ".csv" else read_jsonl(path)[0]
    wanted = [*mapping.metrics.values(), mapping.step, *filter(None, (mapping.seconds, mapping.tokens, mapping.run))]
    _check_columns(path, wanted, {name for row in rows for name in row})
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        by_run.setdefault(str(row[mapping.run]) if mapping.run else path.stem, []).append(row)
    return [_from_rows(name, path, run, mapping) for name, run in by_run.items()]


def _from_rows(name: str, path: Path, rows: Sequence[Row], mapping: Mapped) -> RunData:
    curves = {}
    for ours, theirs in mapping.metrics.items():
        columns = (mapping.step, mapping.seconds, mapping.tokens, theirs)
        points = [Point(*(_number(row.get(c)) for c in columns)) for row in rows]
        points = [point for point in points if math.isfinite(point.value)]
        curves[ours] = tuple(sorted(points, key=lambda p: p.updates))
    return _run(name, str(path), curves, mapping)


def _from_events(folder: Path, top: Path, mapping: Mapped | None) -> RunData:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = {tag: _scalars(events, tag) for tag in [*events.Tags()["scalars"], *events.Tags()["tensors"]]}
    tags = {tag: points for tag, points in tags.items() if points}
    if mapping is not None:
        _check_columns(folder, [*mapping.metrics.values(), *filter(None, [mapping.tokens])], set(tags))
    metrics = {tag: tag for tag in tags} if mapping is None else mapping.metrics
    start = min((points[0][1] for points in tags.values()), default=0.0)
    tokens = {step: value for step, _, value in tags[mapping.tokens]} if mapping and mapping.tokens else {}
    curves = {
        ours: tuple(Point(step, wall - start, tokens.get(step, math.nan), value) for step, wall, value in tags[theirs])
        for ours, theirs in metrics.items()
    }
    name = folder.name if folder == top else str(folder.relative_to(top))
    return _run(name, str(folder), curves, mapping or Mapped({}))


def _scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float, float]]:
    """(step, wall time, value) of a scalar tag, in either form that TensorBoard has; [] of any other."""
    if tag in events.Tags()["scalars"]:
        return [(e.step, e.wall_time, e.value) for e in events.Scalars(tag)]
    arrays = [(e.step, e.wall_time, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    return [(s, w, float(a)) for s, w, a in arrays if a.ndim == 0 and a.dtype.kind == "f"]


def _run(name: str, source: str, curves: Mapping[str, tuple[Point, ...]], mapping: Mapped) -> RunData:
    about = mapping.runs.get(name, {})
    rates = curves.get("eval/pass_rate", ())
    ends = [p.seconds for points in curves.values() for p in points if math.isfinite(p.seconds)]
    return RunData(
        name=name,
        source=source,
        model=mapping.model or "unknown",
        settings=about.get("settings", {}),
        seed=about.get("seed"),
        curves={key: points for key, points in curves.items() if points and not key.startswith("eval/")},
        evaluations=tuple(evaluation_of(p, mapping.eval_attempts, mapping.eval_tasks) for p in rates),
        seconds=max(ends) - min(ends) if ends else math.nan,
        state="foreign",
    )


def _event_folders(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted({file.parent for file in path.rglob("*tfevents*")})


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def _check_columns(path: Path, wanted: Sequence[str], there: set[str]) -> None:
    missing = [name for name in wanted if name not in there]
    if missing:
        close = nearest(missing[0], there)
        hint = f"; the nearest is {close!r}" if close else ""
        raise MappingError(f"{path} has no {missing[0]!r}, which the mapping names{hint}; it has {sorted(there)[:20]}")


def _number(value: Any) -> float:
    """NaN for an empty cell."""
    if value is None or value == "":
        return math.nan
    try:
        return float(value)
    except ValueError as error:
        raise MappingError(f"{json.dumps(value)} is no number, but the mapping reads it as one") from error
