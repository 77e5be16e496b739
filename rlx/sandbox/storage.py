"""Where workspaces lie: each in a file system of its own in memory, where this process may mount one, else on disk.

A file system of its own has a size that nothing gets around, deleted files that are still open included. On disk the
workspace is looked at while programs run, and a program is ended some tenths of a second after it has gone too far.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import tempfile
from pathlib import Path

from rlx.config.sandbox import SandboxLimits
from rlx.sandbox import cgroups, files
from rlx.sandbox.base import SandboxError
from rlx.sandbox.cgroups import Hierarchies

PREFIX = "rlx-sandboxes-"
_LOCK = "lock"
_NOSUID, _NODEV = 2, 4  # mount flags
_DETACH, _NO_LINK = 2, 8  # flags of unmounting


class Root:
    """The directory of a process's sandboxes. A lock says that the process lives; what dead ones left is removed."""

    def __init__(self, directory: str, groups: Hierarchies, *, own_users: bool):
        """Raises SandboxError where `directory` is none, or users that sandboxes have of their own cannot reach it."""
        parent = Path(directory or tempfile.gettempdir()).absolute()
        if not parent.is_dir():
            raise SandboxError(f"sandbox.directory = '{parent}': there is no such directory")
        if own_users:
            _check_passable(parent)
        _sweep(str(parent), groups)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory or None))
        self.path.chmod(0o711)  # users of sandboxes pass through and see nothing
        self._lock = os.open(self.path / "locking", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / "locking", self.path / _LOCK)  # never there unlocked: another process would clear it
        self._groups = groups
        self.in_memory = self._can_mount()

    def make(self, name: str, owner: int | None, limits: SandboxLimits) -> str:
        """A workspace. Raises: OSError."""
        path = str(self.path / name)
        os.mkdir(path, 0o700)
        user = os.geteuid() if owner is None else owner
        if self.in_memory:
            options = f"size={limits.disk_bytes},nr_inodes={limits.files},mode=700,uid={user},gid={user}"
            try:
                _mount(path, options)
            except OSError:
                os.rmdir(path)
                raise
        elif owner is not None:
            os.chown(path, owner, owner)
        return path

    def remove(self, workspace: str) -> None:
        if self.in_memory:
            _unmount(workspace)
            os.rmdir(workspace)
        else:
            files.remove(workspace)

    def close(self) -> None:
        try:
            _remove_groups(self.path.name, self._groups)  # of sandboxes that could not remove them
        finally:
            _clear(self.path)
            os.close(self._lock)

    def _can_mount(self) -> bool:
        probe = str(self.path / "probe")
        os.mkdir(probe)
        try:
            _mount(probe, "size=4096")
        except OSError:
            return False
        finally:
            _unmount(probe)
            os.rmdir(probe)
        return True


def _check_passable(directory: Path) -> None:
    for above in (directory, *directory.parents):
        if not above.stat().st_mode & 0o001:
            raise SandboxError(
                f"sandbox.directory = '{directory}': the users of sandboxes cannot pass through {above}, whose mode is "
                f"{above.stat().st_mode & 0o777:03o}; choose a directory that all may pass through, such as /var/tmp"
            )


def _sweep(directory: str, groups: Hierarchies) -> None:
    """Remove what processes left that could not remove it themselves, killed or out of power."""
    for lock in Path(directory).glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if not _is_ours(lock.parent):
                continue
            file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_groups(lock.parent.name, groups)
                _clear(lock.parent)
            finally:
                os.close(file)


def _is_ours(directory: Path) -> bool:
    """Nobody else can have put anything into it: another user's would lead this process to what is not its own."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _remove_groups(name: str, groups: Hierarchies) -> None:
    for parent in set(groups.directories.values()):
        for group in parent.glob(f"{name}-*"):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            cgroups.remove(group)


def _clear(root: Path) -> None:
    for workspace in root.iterdir():
        _unmount(str(workspace))
    files.remove(str(root))


def _mount(path: str, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"rlx", os.fsencode(path), b"tmpfs", _NOSUID | _NODEV, options.encode()) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"could not mount a file system at {path}: {os.strerror(error)}")


def _unmount(path: str) -> None:
    """Nothing where nothing is mounted."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(path), _DETACH | _NO_LINK)
