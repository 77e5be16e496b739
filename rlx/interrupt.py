"""SIGTERM and Ctrl-C: finish what must be finished, save, and leave with a code of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType, TracebackType
from typing import Any

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: start the same command again and it continues


class Preempted(Exception):
    """A signal to stop arrived; raised between two phases or out of a cancelled rollout, never inside an update."""


class Preemption:
    """Turns SIGTERM and SIGINT into `Preempted` at a safe point, for as long as the context lasts.

    A second Ctrl-C does what it does elsewhere: it ends the process where it is. One event loop for the run.
    """

    def __init__(self) -> None:
        self.requested = False
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Preemption:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                "an event loop is running already, as in a notebook, and a run needs one of its own: start it as a "
                "process, `rlx train --config=...`"
            )
        self._previous = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGTERM, signal.SIGINT)}
        self._runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._runner.__exit__(kind, error, trace)

    def check(self) -> None:
        if self.requested:
            raise Preempted

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop; a signal cancels it at its next await."""
        try:
            return self._runner.run(self._watch(work))
        except asyncio.CancelledError:
            self.check()
            raise

    def finish[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, signal or not: for what must not be left half done."""
        return self._runner.run(work)

    async def _watch[T](self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        if self.requested:
            work.close()
            raise Preempted
        try:
            return await work
        finally:
            self._task = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if signum == signal.SIGINT:
            signal.signal(signum, self._previous[signal.SIGINT])
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
