"""Ending and burying what a command started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


_adopters: list[int] = []  # an entry for each provider that needs it: the flag is one of the whole process


def adopt_orphans(yes: bool) -> None:
    """Whether this process becomes the parent of processes whose parents end, where that is the system's first now.

    It is so until each caller with True has called with False. `reap_adopted` is to be called meanwhile.

    bubblewrap ends without waiting for the first process of its PID namespace. That one stays a zombie, which counts
    against its control group's processes, until its new parent waits for it: the first process of a container may
    never do so, and this one does (`bury`).
    """
    if yes:
        _adopters.append(os.getpid())
    elif _adopters:
        _adopters.pop()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(bool(_adopters)), 0, 0, 0)


def reap_adopted() -> None:
    """Wait for the processes that have ended and that this process has adopted: of servers and graders, too.

    They are told by their sessions, since a child of one's own is in the session of its parent, or leads one. So one
    that leads its session, or was begun in that of this process, is left to whoever has begun it.
    """
    own = os.getsid(0)
    for child in _children(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ChildProcessError):
            state, _, _, session, *_ = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if state == "Z" and int(session) not in (own, child):
                os.waitpid(child, os.WNOHANG)


def first_process(info: int) -> int | None:
    """The first process of a namespace, as bubblewrap has written it to a file without a name; None: not yet."""
    said = os.pread(info, 4096, 0)
    return int(json.loads(said)["child-pid"]) if said.rstrip().endswith(b"}") else None


def kill_group(leader: int) -> None:
    """SIGKILL to a process and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill(process: int, parent: int) -> None:
    """SIGKILL to a child of `parent`, or of this process: another may have its number by now, and is left alone."""
    if process in _children(parent) or _is_ours(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _is_ours(process: int) -> bool:
    """Whether it is a child of this process that has not been waited for."""
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def bury(process: int) -> bool:
    """Whether a process that was killed is gone, with its namespace where it was the first process of one."""
    try:
        return os.waitpid(process, os.WNOHANG)[0] == process
    except ChildProcessError:
        return True  # its first parent has waited for it


def deleted_bytes(first: int, device: int) -> int:
    """Bytes on a device of files that have no name any more and that processes of a PID namespace keep open.

    first: a process of the namespace.
    """
    seen: dict[int, int] = {}
    with contextlib.suppress(OSError):  # it ends
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ends, or is another user's
                if os.readlink(f"/proc/{process}/ns/pid") == namespace:
                    seen |= _deleted(f"/proc/{process}/fd", device)
    return sum(seen.values())


def _deleted(opened: str, device: int) -> dict[int, int]:
    """Inode -> bytes."""
    found = {}
    for file in os.listdir(opened):
        with contextlib.suppress(OSError):
            status = os.stat(f"{opened}/{file}")
            if status.st_nlink == 0 and status.st_dev == device:
                found[status.st_ino] = status.st_blocks * 512
    return found
