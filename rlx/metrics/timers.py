"""Named timers of the training loop, and rates that leave out what would distort them.

Time belongs to the innermost timer that runs: an inner timer's seconds are not its outer one's too, so the phases of an
update never add up to more than its wall time. One thread starts and stops them.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple


class UpdateTimes(NamedTuple):
    """What one update took, and the rates of the run up to and including it."""

    seconds: dict[str, float]  # by timer
    total: float  # s of wall time since the last update ended
    rates: dict[str, float]  # per second, by the name of what was counted; empty while every update was skipped

    def share(self, *names: str) -> float:
        """The part of the wall time that these timers took together; a timer that never ran took none."""
        taken = sum(seconds for name, seconds in self.seconds.items() if name in names)
        return taken / self.total if self.total > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """Metrics of the group `time/`."""
        return {"time/total_seconds": self.total} | {f"time/{n}_seconds": s for n, s in self.seconds.items()}


class Timers:
    """`with timers("update"): ...`, then `end_update` once an update.

    Args:
      skip_updates: the first updates of this process are outside every rate: they hold compilation and warm-up.
      apart: timers whose seconds are outside every rate, such as evaluation and saving.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        skip_updates: int = 3,
        apart: tuple[str, ...] = ("eval", "save", "sft"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._skip_updates, self._apart, self._clock = skip_updates, apart, clock
        self._running: list[str] = []
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._totals: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._counted: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._counted_seconds = 0.0
        self._updates = 0
        self._update_started = self._lap_started = clock()

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by timer over all ended updates of this process, skipped ones too."""
        return dict(self._totals)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._lap()
        self._running.append(name)
        try:
            yield
        finally:
            self._lap()
            self._running.pop()

    def end_update(self, counts: Mapping[str, float], compiled: bool = False) -> UpdateTimes:
        """Closes an update: its seconds go to the totals, the timers start at zero again.

        Args:
          counts: what this update did, for instance {"trained_tokens": 4096}; each name becomes a rate.
          compiled: the update held a compilation, so it is outside every rate.
        Raises:
          RuntimeError: while a timer runs: its phase would be cut in two.
        """
        if self._running:
            raise RuntimeError(f"the update ends while the timer {self._running[-1]!r} runs; leave its block first")
        now = self._clock()
        total, seconds = now - self._update_started, dict(self._seconds)
        self._updates += 1
        if self._updates > self._skip_updates and not compiled:
            self._counted_seconds += total - sum(seconds.get(name, 0.0) for name in self._apart)
            for name, count in counts.items():
                self._counted[name] += count
        for name, value in seconds.items():
            self._totals[name] += value
        self._seconds.clear()
        self._update_started = now
        return UpdateTimes(seconds, total, self._rates())

    def _lap(self) -> None:
        """Books the time since the last switch on the timer that ran until now, if one did."""
        now = self._clock()
        if self._running:
            self._seconds[self._running[-1]] += now - self._lap_started
        self._lap_started = now

    def _rates(self) -> dict[str, float]:
        if self._counted_seconds <= 0:
            return {}
        return {name: count / self._counted_seconds for name, count in self._counted.items()}
