"""Graded groups that wait for an update, and the batch that is made of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence

from rlx.rollout.budgets import Books, Gauge
from rlx.rollout.fates import Rules, ages, count, fate, graded, newest, oldest, ungraded
from rlx.types import Count, Group, Sample


class StaleError(RuntimeError):
    """A batch holds a token older than the largest policy lag: a defect, never a matter of timing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One collection."""

    version: int  # of the learner that it was taken for
    groups: tuple[Group, ...]  # all that were taken, whole
    samples: tuple[Sample, ...]  # of these, what goes into the loss

    def check_ages(self, version: int, max_lag: int) -> None:
        """Raises StaleError where a token is older than `max_lag` updates for a learner of `version`."""
        for sample in self.samples:
            if version - sample.oldest_version > max_lag:
                raise StaleError(
                    f"sample {sample.index} of group {sample.group} has a token of version {sample.oldest_version}, "
                    f"{version - sample.oldest_version} updates old; max_policy_lag is {max_lag}"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class _Entry:
    group: Group
    entered: float
    oldest: int
    newest: int


class Buffer:
    """First in, first out; what is too old when its turn comes is discarded. One batch is out at a time.

    `on_change` is called when groups have left; `on_stale` with each group whose task should be tried again.
    """

    def __init__(self, rules: Rules, books: Books):
        self.rules, self.books = rules, books
        self.on_change: Callable[[], None] | None = None
        self.on_stale: Callable[[Group], None] | None = None
        self.gauge = Gauge()
        self.consumed_ages: Counter[int] = Counter()  # tokens of the last applied batch, by age
        self._arrived: deque[_Entry] = deque()
        self._fresh: list[_Entry] = []  # fit for the version that waits
        self._early: list[_Entry] = []  # of versions that the learner has not reached again
        self._batch: Batch | None = None
        self._ahead = 0  # groups of the batch that was taken last, until the next is asked for
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._arrived) + len(self._fresh)

    @property
    def full(self) -> bool:
        """A collection waits: no new group should begin."""
        return len(self) >= self.rules.collection

    def room_for(self, open_groups: int) -> bool:
        """Whether a group that begins now, after `open_groups` others, can be trained before it is too old.

        The next batch is trained at most one update after the version that engines serve, each further one an update
        later. What would be stale when its turn comes is better not begun.
        """
        if self.full:
            return False
        return self._ahead + len(self) + open_groups < (self.rules.max_lag + 1) * self.rules.collection

    def put(self, group: Group, version: int) -> None:
        """A group whose samples have all been graded, or failed: from in flight to buffered, or to how they failed.

        version: what engines are to serve now, for the ages of what failed.
        """
        for sample in group.samples:
            self.books.book_end(sample.stop_reason.value, sample.num_written, 1)
        held = count(graded(group).samples)
        for i, (name, samples) in enumerate(ungraded(group).items()):
            self._move("in_flight", samples, name, version, int(i == 0 and not held.samples))
        if not held.samples:
            return
        self.books.move("in_flight", "buffered", held.tokens, held.samples, 1)
        self.add(group)

    def add(self, group: Group) -> None:
        """`put`, for a group that is booked as buffered already."""
        written = graded(group).samples
        first, last = oldest(written), newest(written)
        assert first is not None
        assert last is not None
        self._arrived.append(_Entry(group, self.gauge.enter(), first, last))
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Whoever waits for a batch, now or later, gets `error`, the first where there are several."""
        self._error = self._error or error
        self._news.set()

    async def take(self, version: int) -> Batch:
        """A collection for a learner of `version`, as soon as there is one. `done` must follow.

        Raises what `fail` was given.
        """
        if self._batch is not None:
            raise RuntimeError("a batch was taken and is not done with: call done(batch) before the next take")
        self._arrived = deque([*self._early, *self._fresh, *self._arrived])
        self._early, self._fresh, self._ahead = [], [], 0
        self._changed()
        while True:
            if self._error is not None:
                raise self._error
            self._choose(version)
            if len(self._fresh) >= self.rules.collection:
                break
            self._news.clear()
            await self._news.wait()
        return self._hand_out(version)

    def take_all(self, version: int) -> Batch:
        """`take` of what waits now, up to a collection."""
        if self._batch is not None:
            raise RuntimeError("a batch was taken and is not done with: call done(batch) before the next take")
        self._choose(version)
        return self._hand_out(version)

    def _hand_out(self, version: int) -> Batch:
        entries, self._fresh = self._fresh, []
        for entry in entries:
            self.gauge.leave(entry.entered)
        self._batch = self._settle([e.group for e in entries], version)
        self._ahead = len(entries)
        self._changed()
        return self._batch

    def done(self, batch: Batch, applied: bool) -> None:
        """The batch was trained on; applied=False: the update was not finite and never happened."""
        if batch is not self._batch:
            raise RuntimeError("done is for the batch that was taken last, once")
        batch.check_ages(batch.version, self.rules.max_lag)
        held, by_age = self._held(batch), ages(batch.samples, batch.version)
        self._move(
            "buffered", batch.samples, "trained" if applied else "failed/nonfinite_update", batch.version, held.groups
        )
        self.consumed_ages = by_age if applied else Counter()
        self._batch = None

    def holdings(self) -> dict[str, Count]:
        """What it holds, counted from the samples themselves."""
        held = self._held(self._batch) if self._batch is not None else Count()
        for entry in (*self._early, *self._fresh, *self._arrived):
            held = held.plus(count(graded(entry.group).samples)._replace(groups=1))
        return {"buffered": held}

    def groups(self) -> list[Group]:
        """What waits, in its order. Raises RuntimeError while a batch is out."""
        if self._batch is not None:
            raise RuntimeError("a batch is out: save when it is done")
        return [e.group for e in (*self._early, *self._fresh, *self._arrived)]

    def _choose(self, version: int) -> None:
        """Look at what arrived, until there is a collection."""
        before = len(self)
        while self._arrived and len(self._fresh) < self.rules.collection:
            entry = self._arrived.popleft()
            if version - entry.oldest > self.rules.max_lag:
                self.gauge.leave(entry.entered)
                self._move("buffered", graded(entry.group).samples, "stale", version, 1)
                if self.rules.return_stale and self.on_stale is not None:
                    self.on_stale(entry.group)
            elif entry.newest > version:
                self._early.append(entry)
            else:
                self._fresh.append(entry)
        if len(self) < before:  # stale, or early: whoever found no room may go on
            self._changed()

    def _settle(self, groups: list[Group], version: int) -> Batch:
        trained: list[Sample] = []
        for group in groups:
            end = fate(group, self.rules)
            for i, (name, samples) in enumerate(end.dropped.items()):
                self._move("buffered", samples, name, version, int(i == 0 and not end.trained))
            for before, after in end.cut:
                gone = ages([before], version)
                gone.subtract(ages([after], version))
                self.books.move("buffered", "too_long", gone.total(), ages=gone)
            trained += end.trained
        return Batch(version, tuple(groups), tuple(trained))

    def _move(self, source: str, samples: Sequence[Sample], name: str, version: int, groups: int) -> None:
        lengths = [s.num_written for s in samples]
        by_age = ages(samples, version)
        self.books.move(source, name, sum(lengths), len(lengths), groups, ages=by_age, lengths=lengths)

    def _held(self, batch: Batch) -> Count:
        return count(batch.samples)._replace(groups=len({s.group for s in batch.samples}))

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
