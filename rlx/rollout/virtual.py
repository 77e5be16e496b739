"""Virtual time: asyncio code runs as fast as it computes, and its clock jumps to the next timer.

An event loop asks its selector to wait for I/O until the next timer is due. There is no I/O here, so the selector moves
the clock to that timer and returns. Two runs of the same coroutine do the same things in the same order, as long as it
draws from seeded generators and iterates over no sets of objects.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import selectors
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

SPIN_LIMIT = 1_000_000  # rounds of the loop without a step of the clock
SHOWN = 20  # places that a DeadlockError lists


class DeadlockError(RuntimeError):
    """Tasks wait and nothing is left that could wake them, or they wake each other without end at one moment."""


class VirtualTimeError(RuntimeError):
    """Something asked for what virtual time does not have: threads, sockets, processes."""


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, run to its end on a fresh loop whose clock starts at 0 s.

    `asyncio.get_running_loop().time()`, `asyncio.sleep` and `asyncio.timeout` go by the virtual clock.

    Raises:
      DeadlockError: says where which tasks wait.
      VirtualTimeError: for threads, executors and file descriptors, whose results would come in real time.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _Clock(selectors.BaseSelector):
    """A selector that knows one file, the loop's own wake-up pipe, and advances `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[int, selectors.SelectorKey] = {}
        self._rounds = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._files:
            raise VirtualTimeError("sockets, pipes and processes exist in real time only; use a modelled one")
        return self._files.setdefault(fileobj, selectors.SelectorKey(fileobj, fileobj, events, data))

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(f"nothing is left to happen at {self.now:g} s; {_waiting()}")
        if timeout > 0:
            self.now += timeout
            self._rounds = 0
        else:
            self._rounds += 1
            if self._rounds > SPIN_LIMIT:
                raise DeadlockError(f"{SPIN_LIMIT:,} rounds at {self.now:g} s without a step of time; {_waiting()}")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        # Timers so close fire in one round. The real clock's nanosecond is lost in a float after some months.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise VirtualTimeError(f"{func!r} would run in a thread, in real time; use a modelled one")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        # Signal handlers and futures that are resolved here come from the loop's own thread.
        if threading.get_ident() != self._thread_id:  # type: ignore[attr-defined]
            raise VirtualTimeError(f"{callback!r} comes from another thread, at no moment of virtual time")
        return self.call_soon(callback, *args, context=context)


def _waiting() -> str:
    """Where the tasks of the running loop wait, those at one place together."""
    # The loop is between two steps: it runs, but no task does.
    places = collections.Counter(_place(task) for task in asyncio.all_tasks(asyncio.get_running_loop()))
    lines = [f"  {count} at {place}" for place, count in places.most_common(SHOWN)]
    left_out = len(places) - len(lines)
    return "\n".join(["waiting tasks:", *lines, *([f"  and at {left_out} other places"] if left_out else [])])


def _place(task: asyncio.Task) -> str:
    """The chain of coroutines of a task, outermost first, with the line that each is at."""
    chain = []
    waiting: Any = task.get_coro()
    while inspect.iscoroutine(waiting) and waiting.cr_frame:
        code = waiting.cr_code
        chain.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{waiting.cr_frame.f_lineno})")
        waiting = waiting.cr_await
    return " > ".join(chain) or repr(task)
