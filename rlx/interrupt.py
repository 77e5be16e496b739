"""SIGTERM and Ctrl-C: finish what must be finished, save, and leave with a code of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: start the same command again and it continues


class Preempted(Exception):
    """A signal to stop arrived; raised between two phases or out of a cancelled rollout, never inside an update."""


class Preemption:
    """Turns SIGTERM and SIGINT into `Preempted` at a safe point, for as long as the context lasts.

    A second Ctrl-C does what it does elsewhere: it ends the process where it is. One event loop for the run, in a
    thread of its own, so that what was begun on it goes on while the main thread trains. Enter it in the main thread:
    only that one gets signals.
    """

    def __init__(self) -> None:
        self.requested = False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Preemption:
        self._previous = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGTERM, signal.SIGINT)}
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="host", daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self, started: threading.Event) -> None:
        """The loop's life; leaving it cancels what still runs there."""
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._over.wait()

    def check(self) -> None:
        if self.requested:
            raise Preempted

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop; a signal cancels it at its next await."""
        try:
            return self.finish(self._watch(work))
        except concurrent.futures.CancelledError as error:
            self.check()
            raise asyncio.CancelledError from error

    def finish[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, signal or not: for what must not be left half done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call[T](self, function: Callable[[], T]) -> T:
        """The result of `function`, called on the loop: what it sees there does not change under its eyes."""

        async def job() -> T:
            return function()

        return self.finish(job())

    async def _watch[T](self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        if self.requested:
            work.close()
            raise Preempted
        try:
            return await work
        finally:
            self._task = None

    def request(self) -> None:
        """As if a signal had come; from any thread."""
        self.requested = True
        if (task := self._task) is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            signal.signal(signum, self._previous[signal.SIGINT])
        self.request()
