"""Waiting with an end: whatever is awaited, and however deaf it is to being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def bounded[T](
    work: Coroutine[Any, Any, T], limit_s: float, late: Callable[[asyncio.Task[T]], object] | None = None
) -> T:
    """The result of `work` within `limit_s` seconds.

    Work that takes longer is cancelled and left alone: it may never end. `late` is called with its task should it.

    Raises TimeoutError, and what `work` raises.
    """
    loop = asyncio.get_running_loop()
    # It begins here and now: most calls of an environment end without ever waiting, and cost no round of the loop.
    task = asyncio.Task(work, loop=loop, eager_start=True)
    if not task.done():
        ended = loop.create_future()
        timer = loop.call_later(limit_s, _wake, ended)
        task.add_done_callback(lambda _: _wake(ended))
        try:
            await ended
        except asyncio.CancelledError:
            abandon(task, late)
            raise
        finally:
            timer.cancel()
    if task.cancelled():  # by itself: passed on, it would look as if the waiter were cancelled
        raise RuntimeError("it was cancelled from inside")
    if task.done():
        return task.result()
    abandon(task, late)
    raise TimeoutError(f"not done within {limit_s:g} s")


def abandon[T](task: asyncio.Task[T], late: Callable[[asyncio.Task[T]], object] | None = None) -> None:
    """Cancel `task` and go on without it."""
    task.add_done_callback(_retrieve if late is None else late)
    task.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Its error was its waiter's business, who has gone; asyncio would log it as forgotten."""
    if not task.cancelled():
        task.exception()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
