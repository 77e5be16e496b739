"""What a sandbox is: an isolated workspace in which one session's programs run. Every provider implements it."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlx.config.sandbox import SandboxLimits


class Limit(enum.StrEnum):
    """Which limit ended a command."""

    WALL = "wall"  # seconds
    CPU = "cpu"  # seconds, of all its processes
    MEMORY = "memory"  # the system killed a process of it
    OUTPUT = "output"  # bytes of stdout and stderr together
    DISK = "disk"  # bytes in the workspace
    FILES = "files"  # entries in the workspace, directories too deep or made unreadable


class SandboxError(RuntimeError):
    """The sandbox, not the program in it, failed."""


class WorkspaceError(SandboxError):
    """What is in the workspace, or was asked of it, is at fault: it is full, a file too large, a command too long.

    Whoever filled it is answered with this; the sandbox itself is in order.
    """


class PathError(ValueError):
    """A path that is not a place for a file in the workspace: absolute, with "..", or through a link."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a command ended. Whatever it started has ended with it."""

    exit_code: int  # 128 + the signal's number where a signal ended it
    stdout: bytes
    stderr: bytes
    seconds: float  # from its start until nothing of it was left
    stopped_by: Limit | None = None


def sayable(word: str) -> bool:
    """Whether a system can be given it: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def check_command(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises: ValueError for what no system can run."""
    if isinstance(command, str) or not command or not all(map(sayable, command)):
        raise ValueError(
            f"a command is a sequence of words, such as ['python3', 'a.py'], without NUL or halves of surrogate pairs, "
            f"not {command!r}"
        )
    for name, value in env.items():
        if not name or "=" in name or not sayable(name + value):
            raise ValueError(f"env has {name!r} = {value!r}: names have no '=', neither have names or values NUL")


class Sandbox(Protocol):
    """A workspace, a directory of files that stays from command to command; paths are relative to it."""

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Execution:
        """Run a command in the workspace to its end, or to the first of its limits.

        Args:
          timeout_s: wall-clock seconds, where fewer than the sandbox's own limit.
          env: variables beside PATH, HOME, TMPDIR and LANG; nothing of this process's environment is passed on.
        Raises:
          SandboxError: it could not be run. WorkspaceError: it is too long. ValueError: it is none.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Put a file, in directories made where missing.

        Raises: PathError, SandboxError, WorkspaceError where there is no room.
        """
        ...

    async def read(self, path: str) -> bytes:
        """The content of a regular file.

        Raises: PathError, FileNotFoundError, SandboxError, WorkspaceError for more than file_bytes.
        """
        ...

    async def list(self) -> list[str]:
        """The paths of the regular files, sorted.

        Raises: SandboxError, WorkspaceError for more than the limits allow.
        """
        ...

    async def snapshot(self) -> bytes:
        """The workspace as a tar: equal for equal files, links and directories, whenever they were made.

        Raises: SandboxError, WorkspaceError for more than the limits allow.
        """
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Replace everything in the workspace by a snapshot."""
        ...

    async def close(self) -> None:
        """Remove it. May be called again."""
        ...


class Provider(Protocol):
    """Who makes sandboxes. `rlx.sandbox.pool.Sandboxes` opens and closes them."""

    async def start(self) -> None:
        """Check that sandboxes can be made. Raises: SandboxError, saying what to do."""
        ...

    async def open(self, limits: SandboxLimits) -> Sandbox: ...

    async def close(self) -> None: ...

    def describe(self) -> dict[str, str]:
        """What protects from what: {"network": "a network namespace without interfaces", ...}."""
        ...
