"""How much may be under way at once, and how full it was."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from rlx.config.schema import ProducerConfig, RolloutConfig
from rlx.types import Count


class Books(Protocol):
    """What is needed of `rlx.metrics.ledger.Ledger`."""

    @property
    def total(self) -> Count: ...

    def generated(self, tokens: int, samples: int = 0, groups: int = 0) -> None: ...

    def move(
        self,
        source: str,
        target: str,
        tokens: int,
        samples: int = 0,
        groups: int = 0,
        *,
        ages: Mapping[int, int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None: ...

    def book_end(self, reason: str, tokens: int, samples: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Limits of one run."""

    sessions: int  # open sessions
    samples: int  # submitted and not yet graded
    groups: int  # graded groups that wait: one collection; a full buffer lets no new group begin


def budgets(producer: ProducerConfig, rollout: RolloutConfig, slots: int) -> Budgets:
    """slots: requests that the fleet runs at once, over all its engines."""
    collection = rollout.tasks_per_update * rollout.group_size
    needed = max(collection, 2 * slots)
    automatic = -(-needed // rollout.group_size) * rollout.group_size
    return Budgets(producer.sessions_in_flight, producer.max_concurrent_samples or automatic, rollout.tasks_per_update)


class Gauge:
    """Occupancy and residence time of a place: who is in it, and how long those that left had been. O(1) an event."""

    def __init__(self) -> None:
        self.level = 0
        self.peak = 0
        self._area = 0.0  # integral of the level over time since `take`, unit x s
        self._since: float | None = None  # not before the first event: a gauge is made before its loop runs
        self._begun = 0.0
        self._left = 0
        self._stayed = 0.0  # s, over those that left

    def enter(self) -> float:
        """Returns the time, which `leave` wants back."""
        now = self._advance()
        self.level += 1
        self.peak = max(self.peak, self.level)
        return now

    def leave(self, entered: float | None = None) -> None:
        """Without the time of entering only the occupancy is known."""
        now = self._advance()
        self.level -= 1
        if entered is not None:
            self._left += 1
            self._stayed += now - entered

    def take(self) -> dict[str, float]:
        """Since the last call: occupancy (mean level), peak, and where someone left seconds (mean residence time)."""
        now = self._advance()
        span = now - self._begun
        values = {"occupancy": self._area / span if span > 0 else float(self.level), "peak": float(self.peak)}
        if self._left:
            values["seconds"] = self._stayed / self._left
        self._area, self._begun, self._left, self._stayed, self.peak = 0.0, now, 0, 0.0, self.level
        return values

    def _advance(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._begun = self._since = now
        self._area += self.level * (now - self._since)
        self._since = now
        return now
