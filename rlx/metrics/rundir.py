"""The directory of a run: who may write it, what is in it, and going back to an earlier update.

config.json  metrics.jsonl  samples.jsonl  ledger.json  summary.json or stopped.json  events/  checkpoints/  lock
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, TextIO

from rlx.metrics.jsonl import JsonlWriter

LOCK = "lock"
STOPPED = "stopped.json"  # of a run that ended with an error: its kind and reason


class RunDirectoryError(RuntimeError):
    """The directory cannot be used as asked."""


class Records(NamedTuple):
    """How many records metrics.jsonl and samples.jsonl have."""

    metrics: int
    samples: int


class Rewound(NamedTuple):
    """What `RunDirectory.rewind` dropped: records beyond the restored moment, and last lines torn by a kill."""

    metrics: int
    samples: int
    torn: int


class RunDirectory:
    """An open, locked run directory; `open_run` makes one. Close it, or use it in a `with`."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self._lock = lock
        self.config = path / "config.json"
        self.ledger = path / "ledger.json"
        self.summary = path / "summary.json"
        self.stopped = path / STOPPED
        self.events = path / "events"
        self.checkpoints = path / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        self.metrics = JsonlWriter(path / "metrics.jsonl")
        self.samples = JsonlWriter(path / "samples.jsonl")

    @property
    def latest_checkpoint(self) -> int | None:
        """The update of the newest complete checkpoint, None where there is none."""
        return max(_checkpoint_updates(self.path), default=None)

    @property
    def records(self) -> Records:
        return Records(self.metrics.count, self.samples.count)

    def rewind(self, to: Records) -> Rewound:
        """Drops the records after those that there were at the restored moment; `Records(0, 0)` for a fresh start.

        Raises:
          ValueError: where there are fewer.
        """
        for file, count in ((self.metrics, to.metrics), (self.samples, to.samples)):
            if file.count < count:
                raise ValueError(f"{file.path} has {file.count} records, it had {count}: something else cut it")
        torn = self.metrics.torn + self.samples.torn
        return Rewound(self.metrics.keep(to.metrics), self.samples.keep(to.samples), torn)

    def sync(self) -> None:
        """Forces the appended records to the disk."""
        self.metrics.sync()
        self.samples.sync()

    def close(self) -> None:
        """Closes the files and gives the lock up."""
        self.metrics.close()
        self.samples.close()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_run(path: Path, resume: Literal["auto", "never", "must"]) -> RunDirectory:
    """Locks the directory, made where it is missing, for this process.

    The caller restores `latest_checkpoint` where there is one, then calls `rewind`.

    Raises:
      RunDirectoryError: while another process writes the directory; for resume = "never" where a run was in it; for
        "must" where it has no checkpoint.
      ValueError: where metrics.jsonl or samples.jsonl is damaged before its last line.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    try:
        _check_resume(path, resume)
        return RunDirectory(path, lock)
    except BaseException:
        lock.close()
        raise


def _check_resume(path: Path, resume: Literal["auto", "never", "must"]) -> None:
    used = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK and not _is_empty(entry))
    if resume == "never" and used:
        raise RunDirectoryError(
            f"run.resume = 'never' but {path} is in use (it has {', '.join(used[:4])}): "
            f"choose another run.name, remove the directory, or set run.resume = 'auto' to continue"
        )
    if resume == "must" and not _checkpoint_updates(path):
        raise RunDirectoryError(
            f"run.resume = 'must' but {path / 'checkpoints'} has no checkpoint: "
            f"check run.directory and run.name, or set run.resume = 'auto' to start"
        )


def _is_empty(path: Path) -> bool:
    """What a start leaves that was refused before it wrote anything."""
    return not any(path.iterdir()) if path.is_dir() else not path.stat().st_size


def _checkpoint_updates(path: Path) -> list[int]:
    """Complete checkpoints are directories named by their update; one being written has a longer name."""
    directory = path / "checkpoints"
    if not directory.is_dir():
        return []
    return [int(entry.name) for entry in directory.iterdir() if entry.name.isdigit() and entry.is_dir()]


def _lock(path: Path) -> TextIO:
    """An exclusive lock that the kernel gives up with the process, however it ends. The file stays."""
    file = (path / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "an unknown process"
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise RunDirectoryError(f"{path} is being written by {owner}: stop it, or choose another run.name") from error
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
