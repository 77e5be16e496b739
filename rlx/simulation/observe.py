"""What is watched while a simulation runs: how full the engines are, and what an update took."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable

MOST_POINTS = 1024  # of a timeline


@dataclasses.dataclass(frozen=True)
class Update:
    """One turn of the trainer's loop, in seconds since the beginning, and what it trained on."""

    began: float  # it turned to the buffer
    taken: float  # it had a batch
    trained: float  # it had trained on it
    published: float  # the engines had the weights, or were on their way to them
    ended: float
    tokens: int  # of the batch, prompts included
    trained_tokens: int  # of these, in the loss
    samples: int
    groups: int  # taken, those without signal included
    ages: Counter[int]  # trained tokens by their age in updates


class Meter:
    """A level and its integral over time."""

    def __init__(self) -> None:
        self.level = 0
        self._area = 0.0
        self._at = 0.0
        self._turned: asyncio.Future[None] | None = None

    def add(self, change: int) -> None:
        self.area()
        before, self.level = self.level, self.level + change
        if self._turned is not None and not self._turned.done() and (before == 0) != (self.level == 0):
            self._turned.set_result(None)

    async def turned(self) -> None:
        """Until the level becomes 0, or is no longer."""
        self._turned = asyncio.get_running_loop().create_future()
        try:
            await self._turned
        finally:
            self._turned = None

    def area(self) -> float:
        """The integral of the level until now, in units of seconds."""
        now = asyncio.get_running_loop().time()
        self._area += self.level * (now - self._at)
        self._at = now
        return self._area


class Timeline:
    """Levels at regular times; the interval doubles whenever there are too many of them."""

    def __init__(self, levels: dict[str, Callable[[], float]]):
        self._levels = levels
        self._interval = 1.0
        self.times: list[float] = []
        self.values: dict[str, list[float]] = {name: [] for name in levels}

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.times.append(asyncio.get_running_loop().time())
            for name, level in self._levels.items():
                self.values[name].append(level())
            if len(self.times) >= MOST_POINTS:
                del self.times[1::2]
                for values in self.values.values():
                    del values[1::2]
                self._interval *= 2
            await asyncio.sleep(self._interval)
