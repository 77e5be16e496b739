"""A process that runs one function on request and can be killed in the middle of it.

Why not a pool from a library: `concurrent.futures` cannot kill a running call, pebble's pool is broken for good once
an idle worker dies, and multiprocessing's spawn runs the parent's `__main__` again in the child, which imports jax
there and breaks scripts without a guard. Here the child is `python -m rlx.envs.workers`, and a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_READY = "ready"
_START_TIMEOUT_S = 300.0  # imports, on a loaded machine


class WorkerTimeout(Exception):
    """The call did not end in time; its process was killed."""


class WorkerDied(Exception):
    """The process ended during the call, or before it was ready."""


@dataclasses.dataclass(frozen=True)
class _Live:
    process: subprocess.Popen[bytes]
    connection: Connection

    def send(self, message: Any) -> None:
        """Raises: WorkerDied, and whatever pickling raises."""
        try:
            self.connection.send(message)
        except OSError as error:  # it is dying, which `poll` may not know yet
            raise WorkerDied(f"the worker process ended with exit code {self.process.wait()}") from error

    def receive(self, timeout_s: float) -> Any:
        """Raises: WorkerTimeout, with the process still running; WorkerDied."""
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(f"the worker process ended with exit code {self.process.wait()}") from error
        raise WorkerTimeout(f"no answer within {timeout_s:g} s")


class Worker:
    """`call(*arguments)` is `function(*arguments)` in another process. Functions must be picklable by name.

    One thread may use it at a time; `interrupt` may come from any. A worker whose process has ended, killed by `call`
    or by the system, starts another with the next call.
    """

    def __init__(self, function: Callable[..., Any], warm_up: Callable[[], None]):
        self._setup = (function, warm_up)
        self._live: _Live | None = None

    def start(self) -> _Live:
        """Launch the process and return; it imports and warms up meanwhile."""
        parent, child = multiprocessing.Pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlx.envs.workers", str(child.fileno())],
            pass_fds=(child.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a grader prints is not the run's output
            process_group=0,  # Ctrl-C is the parent's to handle, from the first moment on
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)},
        )
        child.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended already: wait_ready says so
            parent.send(self._setup)
        self._live = _Live(process, parent)
        return self._live

    def wait_ready(self) -> None:
        """Raises: WorkerDied: it could not start; the process has printed why."""
        live = self._live or self.start()
        try:
            live.receive(_START_TIMEOUT_S)
        except (WorkerDied, WorkerTimeout) as error:
            self.stop()
            raise WorkerDied(f"it was not ready: {error}") from error

    def call(self, *arguments: Any, timeout_s: float) -> Any:
        """Raises: WorkerTimeout, WorkerDied. The time limit does not count the start."""
        live = self._live
        if live is None or live.process.poll() is not None:
            self.stop()
            live = self.start()
            self.wait_ready()
        try:
            live.send((arguments, timeout_s))
            return live.receive(timeout_s)
        except (WorkerDied, WorkerTimeout):
            self.stop()
            raise

    def interrupt(self) -> None:
        """Kill the process; a call in progress raises WorkerDied."""
        if (live := self._live) is not None:
            live.process.kill()

    def stop(self) -> None:
        """Kill the process and release what it held."""
        self.interrupt()
        if (live := self._live) is not None:
            live.process.wait()
            live.connection.close()
        self._live = None


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a scheduler may send it to every process
    function, warm_up = connection.recv()
    warm_up()
    connection.send(_READY)
    while True:
        try:
            arguments, timeout_s = connection.recv()
        except EOFError:
            return
        # The parent kills a call that takes too long; should the parent be gone, this ends it.
        signal.alarm(int(2 * timeout_s) + 2)
        connection.send(function(*arguments))
        signal.alarm(0)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
