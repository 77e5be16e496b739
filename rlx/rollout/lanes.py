"""Several embedded engines as one, each decoding in a thread of its own.

For CPUs: the operations of a decoding step are too small to keep several cores busy, and as many steps of fewer slots
beside each other do. The weights are one engine's. A request goes whole to the lane with the fewest samples asked for,
so a run that asks for all of a round at once, in a fixed order, is reproducible to the bit: lanes do not see how far
the others are.
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
        self.name, self.arch = lanes[0].name, lanes[0].arch
        self.admission = sum(lane.admission for lane in lanes)
        self._lanes = lanes
        self._asked = [0] * len(lanes)  # samples that are not there yet

    @property
    def version(self) -> int:
        """What every lane serves at least."""
        return min(lane.version for lane in self._lanes)

    @property
    def stats(self) -> EngineStats:
        """Totals of all lanes. A prompt counts once in each lane that prefills it."""
        each = [dataclasses.astuple(lane.stats) for lane in self._lanes]
        return EngineStats(*(sum(values) for values in zip(*each, strict=True)))

    async def generate(self, request: Request) -> list[Completion]:
        """See `rlx.rollout.engine.Engine`."""
        number = self._asked.index(min(self._asked))
        self._asked[number] += len(request.seeds)
        try:
            return await self._lanes[number].generate(request)
        finally:
            self._asked[number] -= len(request.seeds)

    async def load(self, weights: Params, version: int, /) -> None:
        """Serve `weights` as `version` from the next token of each lane on.

        Raises what a lane raises, once all have loaded or failed; then they serve different ones until another load.
        """
        weights = served(self.arch, weights)
        ended = await asyncio.gather(*(lane.load(weights, version) for lane in self._lanes), return_exceptions=True)
        for error in filter(None, ended):
            raise error


def lane_config(config: EngineConfig) -> EngineConfig:
    """Of each of `config.lanes`."""
    return dataclasses.replace(config, slots=config.slots // config.lanes, lanes=1)
