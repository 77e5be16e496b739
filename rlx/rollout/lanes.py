"""Several embedded engines as one, each decoding in a thread of its own.

For CPUs: the operations of a decoding step are too small to keep several cores busy, and as many steps of fewer slots
beside each other do. The weights are one engine's. Requests go to the lanes in turn, from the first one on whenever
nothing runs, so a run that asks in a fixed order is reproducible to the bit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from rlx.config.schema import EngineConfig
from rlx.models.spec import Params
from rlx.rollout.engine import Completion, Request
from rlx.rollout.local import EngineStats, LocalEngine, served


class LaneEngine:
    """`rlx.rollout.engine.Replica` of `lanes`, at least one, which serve the same weights."""

    def __init__(self, lanes: Sequence[LocalEngine]):
        first = lanes[0]
        self.name, self.arch, self.config, self.stop_ids = first.name, first.arch, first.config, first.stop_ids
        self.version = first.version
        self.admission = sum(lane.admission for lane in lanes)
        self._lanes = lanes
        self._running = self._next = 0

    @property
    def stats(self) -> EngineStats:
        """Totals of all lanes."""
        each = [dataclasses.astuple(lane.stats) for lane in self._lanes]
        return EngineStats(*(sum(values) for values in zip(*each, strict=True)))

    async def generate(self, request: Request) -> list[Completion]:
        """See `rlx.rollout.engine.Engine`."""
        if not self._running:
            self._next = 0
        lane = self._lanes[self._next]
        self._next = (self._next + 1) % len(self._lanes)
        self._running += 1
        try:
            return await lane.generate(request)
        finally:
            self._running -= 1

    async def load(self, weights: Params, version: int, /) -> None:
        """Serve `weights` as `version` from the next token of each lane on."""
        weights = served(self.arch, weights)
        await asyncio.gather(*(lane.load(weights, version) for lane in self._lanes))
        self.version = version


def lane_config(config: EngineConfig) -> EngineConfig:
    """Of each of `config.lanes`."""
    return dataclasses.replace(config, slots=config.slots // config.lanes, lanes=1)
