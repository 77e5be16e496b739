"""Work in threads that nobody has to wait for, not even the end of the process.

`ThreadPoolExecutor` joins its threads when the interpreter ends, whatever `shutdown` was told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


class Background:
    """`threads` daemon threads that take jobs in the order in which they were given."""

    def __init__(self, threads: int, name: str):
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = threads
        self._closed = False
        for i in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True).start()

    def submit[**P, T](self, job: Callable[P, T], *given: P.args, **named: P.kwargs) -> Future[T]:
        """Gives what `job` returns or raises. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("these threads were closed: they take no further job")
        future: Future[T] = Future()
        self._jobs.put((future, partial(job, *given, **named)))
        return future

    def close(self) -> None:
        """Drop what has not begun. Waits for nothing."""
        self._closed = True
        with contextlib.suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(*job)
            del job  # its arguments may be large


def _run(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # of whoever asks for the result
        future.set_exception(error)
    else:
        future.set_result(result)
