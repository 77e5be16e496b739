"""Running one command to its end or to its first limit, with its output read as it comes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlx.config.sandbox import SandboxLimits
from rlx.sandbox.base import Execution, Limit, SandboxError, WorkspaceError

_CHUNK = 65536  # bytes of one read; what a pipe holds
_LOOK_S = 0.1  # seconds between two looks at what no system call limits
_BUSY = 0.1  # share of the time that looking may take
_DRAIN_S = 1.0  # for the last output, where a process outlives its sandbox's end (kind subprocess)
_SIGNALS = {128 + signal.SIGXCPU: Limit.CPU}


class Tree(NamedTuple):
    """What is known of a command's processes beside the first."""

    kill: Callable[[int, bool], None]  # all that the process of this id started, and itself where it has not ended
    over: Callable[[], Limit | None]  # a limit that has been passed; may take milliseconds
    ended: Callable[[], Limit | None]  # the limit that made the system end it
    settle: Callable[[], bool]  # whether nothing is left of it


class _Capture:
    """The output of a command, as much as is allowed."""

    def __init__(self, limit: int, stop: Callable[[Limit], None]):
        self._left, self._stop = limit, stop
        self._open: dict[int, asyncio.Future[None]] = {}
        self._data: dict[int, bytearray] = {}

    def pipe(self) -> tuple[int, int]:
        """(ours, the command's)"""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        loop = asyncio.get_running_loop()
        self._open[ours], self._data[ours] = loop.create_future(), bytearray()
        loop.add_reader(ours, self._read, ours)
        return ours, theirs

    def _read(self, pipe: int) -> None:
        try:
            chunk = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return
        self._data[pipe] += chunk[: self._left]
        if len(chunk) > self._left:
            self._stop(Limit.OUTPUT)
        self._left -= min(self._left, len(chunk))
        if not chunk:
            self.close(pipe)

    def close(self, pipe: int) -> None:
        if not (done := self._open[pipe]).done():
            asyncio.get_running_loop().remove_reader(pipe)
            os.close(pipe)
            done.set_result(None)

    def abandon(self) -> None:
        for pipe in self._open:
            self.close(pipe)

    async def finish(self) -> tuple[bytes, ...]:
        """The outputs in the order of their pipes."""
        await asyncio.wait(self._open.values(), timeout=_DRAIN_S)
        self.abandon()
        return tuple(bytes(data) for data in self._data.values())


async def execute(
    argv: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: str,
    wall_s: float,
    limits: SandboxLimits,
    tree: Tree,
    pass_fds: Sequence[int] = (),
) -> Execution:
    """Raises: WorkspaceError: it is too long. SandboxError: it could not be started, or not all of it be ended."""
    stopped: asyncio.Future[Limit] = asyncio.get_running_loop().create_future()

    def stop(limit: Limit) -> None:
        if not stopped.done():
            stopped.set_result(limit)

    capture = _Capture(limits.output_bytes, stop)
    start = time.perf_counter()
    process = await _start(argv, stdin, env, cwd, capture, pass_fds)
    timer = asyncio.get_running_loop().call_later(wall_s, stop, Limit.WALL)
    watching = asyncio.create_task(_watch(tree, stop))
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((ending, stopped, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # raises what stopped it from watching
    finally:
        timer.cancel()
        watching.cancel()
        try:
            tree.kill(process.pid, process.returncode is not None)
            code = await asyncio.shield(ending)
            await asyncio.shield(_settle(tree, process.pid))
        finally:
            stdout, stderr = await asyncio.shield(capture.finish())
    code = 128 - code if code < 0 else code
    by = stopped.result() if stopped.done() else tree.ended() or _SIGNALS.get(code)
    return Execution(code, stdout, stderr, time.perf_counter() - start, by)


async def _start(
    argv: Sequence[str], stdin: bytes, env: Mapping[str, str], cwd: str, capture: _Capture, pass_fds: Sequence[int]
) -> asyncio.subprocess.Process:
    source, (_, out), (_, err) = _as_file(stdin), capture.pipe(), capture.pipe()
    try:
        return await asyncio.create_subprocess_exec(
            *argv, stdin=source, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True, pass_fds=pass_fds
        )
    except (OSError, ValueError) as error:
        capture.abandon()
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            raise WorkspaceError("the command is too long: put what is long into a file") from error
        raise SandboxError(f"could not start {argv[0]!r}: {error}") from error
    finally:
        for file in (source, out, err):
            os.close(file)


def _as_file(data: bytes) -> int:
    """Not a pipe: nobody has to feed it."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    file = os.memfd_create("stdin", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


async def _watch(tree: Tree, stop: Callable[[Limit], None]) -> None:
    took_s = 0.0
    while True:
        # First the wait: a command that cleans up what has gone too far gets its chance, a short one costs no look.
        await asyncio.sleep(max(_LOOK_S, took_s / _BUSY))
        start = time.perf_counter()
        if (limit := await asyncio.to_thread(tree.over)) is not None:
            stop(limit)
            return
        took_s = time.perf_counter() - start


async def _settle(tree: Tree, process: int) -> None:
    """Wait until the system has taken down what was killed."""
    for wait_s in (0.0, 0.001, 0.003, 0.01, 0.03, *[0.1] * 50):
        if tree.settle():
            return
        tree.kill(process, True)
        await asyncio.sleep(wait_s)
    raise SandboxError("processes of a command are still there five seconds after they were killed")
