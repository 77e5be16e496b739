"""Files of a workspace, reached without following a link: a program in it cannot lead this process elsewhere."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from rlx.config.sandbox import SandboxLimits
from rlx.sandbox.base import Limit, PathError, SandboxError, WorkspaceError, sayable

MAX_DEPTH = 48
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK)
_CLOSED = (errno.EACCES, errno.EPERM)  # where this process is not root
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(NamedTuple):
    path: str
    kind: str  # file | directory | link | other
    size: int  # bytes as it says
    blocks: int  # bytes on disk
    executable: bool
    target: str  # of a link


class OverLimit(Exception):
    def __init__(self, limit: Limit, message: str):
        super().__init__(message)
        self.limit = limit


def parts(path: str) -> tuple[str, ...]:
    """Raises: PathError."""
    pure = PurePosixPath(path)
    inside = not pure.is_absolute() and ".." not in pure.parts and 0 < len(pure.parts) <= MAX_DEPTH
    if not sayable(path) or not inside:
        raise PathError(
            f"{path!r} is no path of a file in the workspace: give a relative one without '..', such as 'src/main.py'"
        )
    return pure.parts


def write(root: str, path: str, data: bytes, owner: int | None = None, *, executable: bool = False) -> None:
    """Replace or make a file, owned by user and group `owner`. Raises: PathError, SandboxError, WorkspaceError."""
    with _parent(root, path, owner, make=True) as (directory, name):
        _remove_file(directory, name, path)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        with open(file, "wb") as stream:
            stream.write(data)
            os.fchmod(file, 0o755 if executable else 0o644)
            _own(file, owner)


def read(root: str, path: str, max_bytes: int) -> bytes:
    """Raises: PathError, FileNotFoundError, SandboxError, WorkspaceError."""
    with _parent(root, path, None, make=False) as (directory, name):
        return _read_file(directory, name, path, max_bytes)


def scan(root: str, limits: SandboxLimits) -> Iterator[Entry]:
    """Every entry below the workspace's root, in no order.

    Raises:
      OverLimit: more entries or bytes than `limits` allow, directories deeper than MAX_DEPTH or unreadable.
    """
    count = used = 0
    for entry in _walk(os.open(root, _DIRECTORY), "", 0):
        count, used = count + 1, used + entry.blocks
        if count > limits.files:
            raise OverLimit(Limit.FILES, f"more than {limits.files} files and directories (sandbox.limits.files)")
        if used > limits.disk_bytes:
            raise OverLimit(Limit.DISK, f"more than {limits.disk_bytes} bytes (sandbox.limits.disk_bytes)")
        yield entry


def over_limit(root: str, limits: SandboxLimits, more: int = 0) -> Limit | None:
    """more: bytes that belong to the workspace and are not seen in it."""
    try:
        used = more + sum(entry.blocks for entry in scan(root, limits))
    except OverLimit as over:
        return over.limit
    return Limit.DISK if used > limits.disk_bytes else None


def entries(root: str, limits: SandboxLimits) -> list[Entry]:
    """Sorted by path. Raises: WorkspaceError."""
    try:
        return sorted(scan(root, limits))
    except OverLimit as over:
        raise WorkspaceError(f"the workspace has {over}") from over


def remove(path: str) -> None:
    """Delete a tree that a program made: of any depth, and whatever it did to the permissions."""
    command = ["rm", "-rf", "--one-file-system", "--", path]
    if subprocess.run(command, capture_output=True).returncode != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], capture_output=True)
        subprocess.run(command, check=True, capture_output=True)


def pack(root: str, limits: SandboxLimits) -> bytes:
    """A tar of files, directories and links; times and owners are left out, so that equal trees give equal bytes.

    Raises: SandboxError, WorkspaceError.
    """
    buffer = io.BytesIO()
    found = entries(root, limits)
    total = sum(entry.size for entry in found if entry.kind == "file")
    if total > limits.disk_bytes:  # files with holes
        raise WorkspaceError(f"the workspace's files are {total} bytes long, more than sandbox.limits.disk_bytes")
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in found:
            _pack_entry(tar, root, entry)
    return buffer.getvalue()


def unpack(root: str, snapshot: bytes, owner: int | None = None) -> None:
    """Put what `pack` took into an empty workspace. Raises: PathError, SandboxError."""
    try:
        with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as tar:
            for member in tar:
                _unpack_member(root, tar, member, owner)
    except tarfile.TarError as error:
        raise SandboxError(f"the snapshot is no tar: {error}") from error


def _pack_entry(tar: tarfile.TarFile, root: str, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mode = 0o755 if entry.executable else 0o644
    match entry.kind:
        case "directory":
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        case "link":
            info.type, info.linkname = tarfile.SYMTYPE, entry.target
            tar.addfile(info)
        case "file":
            data = read(root, entry.path, entry.size)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _unpack_member(root: str, tar: tarfile.TarFile, member: tarfile.TarInfo, owner: int | None) -> None:
    file = tar.extractfile(member) if member.isreg() else None
    if file is not None:
        write(root, member.name, file.read(), owner, executable=bool(member.mode & 0o100))
        return
    with _parent(root, member.name, owner, make=True) as (directory, name):
        if member.isdir():
            os.close(_enter(directory, name, owner, make=True))
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=directory)
            if owner is not None:
                os.chown(name, owner, owner, dir_fd=directory, follow_symlinks=False)
        else:
            raise SandboxError(f"the snapshot has {member.name!r}, which is no file, directory or symbolic link")


@contextlib.contextmanager
def _parent(root: str, path: str, owner: int | None, *, make: bool) -> Iterator[tuple[int, str]]:
    *above, name = parts(path)
    directory = os.open(root, _DIRECTORY)
    try:
        for step in above:
            inner = _enter(directory, step, owner, make=make)
            os.close(directory)
            directory = inner
        yield directory, name
    except (NotADirectoryError, IsADirectoryError) as error:
        raise PathError(f"{path!r}: {error.strerror} on the way, or a link, which is not followed") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        of_workspace = error.errno in _FULL + _CLOSED + (errno.ENAMETOOLONG,)
        raise (WorkspaceError if of_workspace else SandboxError)(f"{path!r}: {error.strerror}") from error
    finally:
        os.close(directory)


def _enter(directory: int, name: str, owner: int | None, *, make: bool) -> int:
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=directory)
            made = os.open(name, _DIRECTORY, dir_fd=directory)
            _own(made, owner)
            return made
    return os.open(name, _DIRECTORY, dir_fd=directory)


def _own(file: int, owner: int | None) -> None:
    if owner is not None:
        os.fchown(file, owner, owner)


def _remove_file(directory: int, name: str, path: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError) as error:
        raise PathError(f"{path!r} cannot be replaced by a file: {error.strerror}") from error


def _read_file(directory: int, name: str, path: str, max_bytes: int) -> bytes:
    # Not blocking, so that opening a named pipe does not wait for its writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no file {path!r} in the workspace") from error
    except OSError as error:
        raise PathError(f"{path!r} is not a regular file ({error.strerror}); links are not followed") from error
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise PathError(f"{path!r} is not a regular file")
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise WorkspaceError(f"{path!r} has more than {max_bytes} bytes")
    return data


def _walk(directory: int, above: str, depth: int) -> Iterator[Entry]:
    """Takes `directory`, an open descriptor, and closes it. No deeper than MAX_DEPTH, so few are open at once."""
    try:
        if depth >= MAX_DEPTH:
            raise OverLimit(Limit.FILES, f"directories more than {MAX_DEPTH} deep")
        with os.scandir(directory) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):  # a program that runs has removed it
                    entry = _entry(directory, above + item.name, item)
                    yield entry
                    if entry.kind == "directory":
                        yield from _walk(_open_inner(directory, item.name), entry.path + "/", depth + 1)
    finally:
        os.close(directory)


def _open_inner(directory: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except PermissionError as error:
        raise OverLimit(Limit.FILES, f"a directory {name!r} that cannot be read") from error
    except (NotADirectoryError, OSError) as error:
        raise FileNotFoundError(name) from error


def _entry(directory: int, path: str, item: os.DirEntry[str]) -> Entry:
    status = item.stat(follow_symlinks=False)
    kind, target = "other", ""
    if stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISDIR(status.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(status.st_mode):
        kind, target = "link", os.readlink(item.name, dir_fd=directory)
    executable = kind != "link" and bool(status.st_mode & 0o100)
    return Entry(path, kind, status.st_size, status.st_blocks * 512, executable, target)
