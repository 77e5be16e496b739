"""Making a version the one that engines serve: `barrier`, `refresh` or `drain`.

    barrier   no new requests, the running ones end, all engines load, on they go: no response mixes versions
    refresh   all engines load in place; running responses go on with the new weights, each token under its own version
    drain     one engine after another stops taking requests, ends those that it has, and loads; the others serve on

A publication reaches every engine in service; one that misses it is ejected, and readmitted with the current weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from rlx.rollout.fleet import Fleet, Member

Mode = Literal["barrier", "refresh", "drain"]
DRAINED_SHARE = 4  # of the engines in service, one in so many drains at a time, and always one


class Publisher:
    """Use one for a fleet. `publish` returns when the engines serve the version; `drain` returns at once.

    Args:
      prepare: makes of the weights what engines load, once for all of them, before any of them is touched: what cannot
        be published raises there, and the version before goes on being served.
    """

    def __init__(self, fleet: Fleet, mode: Mode, prepare: Callable[[Any, int], Awaitable[Any]] | None = None):
        self.fleet, self.mode, self._prepare = fleet, mode, prepare
        self._drain: asyncio.Task[None] | None = None

    async def publish(self, weights: Any, version: int) -> None:
        """Raises ValueError for a version that is not newer, and what `prepare` raises."""
        if version <= self.fleet.version:
            raise ValueError(f"version {version} is not newer than {self.fleet.version}, which was published")
        if self._prepare is not None:
            weights = await self._prepare(weights, version)
        self.fleet.weights, self.fleet.version = weights, version
        if self.mode == "drain":
            if self._drain is not None and self._drain.done():
                self._drain.result()  # what it failed with ends the run
                self._drain = None
            if self._drain is None:
                self._drain = asyncio.get_running_loop().create_task(self._roll())
            return
        members = self.fleet.in_service
        for member in members:
            self.fleet.close(member)
        if self.mode == "barrier":
            for member in members:
                await member.idle.wait()
        await asyncio.gather(*(self._reload(m) for m in members))

    async def settled(self) -> None:
        """Every engine in service serves the version published last. Raises what a drain failed with."""
        if self._drain is not None:
            await self._drain

    async def close(self) -> None:
        """End a drain where it is."""
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)

    async def _roll(self) -> None:
        """Until every engine in service has the newest version; a version that comes meanwhile is taken along."""
        width = asyncio.Semaphore(max(1, len(self.fleet.in_service) // DRAINED_SHARE))
        while behind := [m for m in self.fleet.in_service if m.versions[-1] != self.fleet.version]:
            await asyncio.gather(*(self._change_over(m, width) for m in behind))

    async def _change_over(self, member: Member, width: asyncio.Semaphore) -> None:
        async with width:
            self.fleet.close(member)
            await member.idle.wait()
            await self._reload(member)

    async def _reload(self, member: Member) -> None:
        """An engine takes requests again when it has loaded, whatever the others do."""
        await self.fleet.reload(member)
        self.fleet.reopen(member)
