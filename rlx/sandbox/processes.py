"""Ending what a command started, where no control group knows it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill(leader: int) -> None:
    """SIGKILL to a process, its children and its process group.

    The one child of bubblewrap is the first process of its PID namespace, with which the kernel ends all others in
    it, whatever they did to get away.
    """
    for process in children(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def children(process: int) -> list[int]:
    """Empty where there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []
