"""Sessions in step: whoever wants the next response waits until nobody is busy with anything else."""

from __future__ import annotations

import asyncio


class Rounds:
    """A barrier of sessions that may leave. When all that are left wait, they go on in the order of their keys."""

    def __init__(self, sessions: int):
        self._busy = sessions  # neither waiting nor gone
        self._waiting: dict[tuple[int, int], tuple[asyncio.Future[None], int]] = {}

    async def turn(self, key: tuple[int, int], places: int = 1) -> None:
        """Wait for the next round. places: sessions that the caller stands for."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiter, places
        self._arrived(places)
        await waiter

    def leave(self) -> None:
        """One session takes part no longer."""
        self._arrived(1)

    def _arrived(self, places: int) -> None:
        self._busy -= places
        if not self._busy:
            asyncio.get_running_loop().call_soon(self._release)  # whoever came last must be waiting by then

    def _release(self) -> None:
        # Tasks wake in the order in which what they wait for was set.
        for _, (waiter, held) in sorted(self._waiting.items()):
            self._busy += held
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
