"""Stopped or killed, a run goes on with everything that was saved or journaled, and generates none of it again."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlx.metrics.ledger import Count
from rlx.rollout import resume, virtual
from rlx.rollout.journal import Journal, read
from rlx.rollout.records import pack, unpack
from rlx.types import Group, Task
from tests.rollout import runs
from tests.rollout.runs import Plan, World, build
from tests.rollout.scripted import tasks

PLAN = Plan(filter_no_signal=False, updates=3, turns=3)


class Stream:
    """A stream of tasks whose position can be saved."""

    def __init__(self) -> None:
        self.position = 0
        self._next, self._seen = tasks(), list[tuple[int, Task]]()

    def __call__(self) -> tuple[int, Task]:
        while len(self._seen) <= self.position:
            self._seen.append(self._next())
        self.position += 1
        return self._seen[self.position - 1]


@dataclasses.dataclass
class Checkpoint:
    """What a process writes down at one moment."""

    data: bytes  # the producer's state
    ledger: dict[str, Any]
    version: int
    position: int
    segment: int


def save(world: World, stream: Stream, journal: Journal) -> Checkpoint:
    return Checkpoint(
        pack(resume.get_state(world.producer)),
        world.ledger.get_state(),
        world.version,
        stream.position,
        journal.rotate(),
    )


async def restore(plan: Plan, saved: Checkpoint, directory: Path, *totals: Count) -> tuple[World, Stream, Journal]:
    """A new process, of the checkpoint and the journal."""
    beyond = list(read(directory, saved.segment))
    stream, journal = Stream(), Journal(directory)
    stream.position = saved.position
    world = build(plan, journal, stream)
    world.ledger.set_state(saved.ledger)
    resume.set_state(world.producer, unpack(saved.data))
    world.ledger.check(world.holdings())
    known = resume.recover(world.producer, beyond)
    world.ledger.book_lost(*totals, *known, world.ledger.total)
    world.ledger.check(world.holdings())
    world.version = world.fleet.version = saved.version
    for member in world.fleet.members:
        member.engine.version = saved.version
        member.versions[:] = [saved.version]
    return world, stream, journal


def by_number(groups) -> dict[int, Group]:
    return {g.samples[0].group: g for g in groups}


def assert_same_samples(one: Group, other: Group) -> None:
    assert [s.index for s in one.samples] == [s.index for s in other.samples]
    for a, b in zip(one.samples, other.samples):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert (a.version_spans, a.stop_reason, a.reward) == (b.version_spans, b.stop_reason, b.reward)


def transcripts(world: World) -> dict[tuple[int, int], list[int]]:
    return {key: s.transcript.tokens().tolist() for key, s in world.producer.open.items()}


# ------------------------------------------------------------------------------------------------------------- stopped


def test_what_engines_had_written_when_it_was_stopped_is_kept():
    """Of engines that say it when they are cancelled, as the embedded one does. Sessions open for 0.03 s."""

    async def main(recalls):
        world = build(dataclasses.replace(PLAN, recalls=recalls))
        async with world.fleet, world.producer:
            await asyncio.sleep(0.075)
        world.check()
        return world

    said, unsaid = (virtual.run(main(recalls)) for recalls in (True, False))
    assert said.error is None
    assert not said.producer.failures
    assert not said.fleet.ejected
    kept, dropped = transcripts(said), transcripts(unsaid)
    more = [len(tokens) - len(dropped[key]) for key, tokens in kept.items()]
    assert more.count(4) >= 2  # 0.045 s of writing
    assert sum(more) == said.ledger.total.tokens - unsaid.ledger.total.tokens


@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("stopped_at", [0.05, 0.21, 0.4, 1.0])
def test_after_a_stop_nothing_is_lost_and_nothing_done_twice(tmp_path, stopped_at, recalls):
    async def first():
        stream, journal = Stream(), Journal(tmp_path)
        world = build(dataclasses.replace(PLAN, recalls=recalls), journal, stream)
        async with world.fleet, world.producer:
            await asyncio.sleep(stopped_at)
        world.check()
        return world, save(world, stream, journal)

    async def second(saved):
        world, _, _ = await restore(PLAN, saved, tmp_path)
        begun, held = transcripts(world), by_number(world.buffer.groups())
        async with world.fleet, world.producer:
            await runs.train(world, PLAN.updates)
        return world, begun, held

    before, saved = virtual.run(first())
    after, begun, held = virtual.run(second(saved))
    assert (before.error, after.error) == (None, None)
    assert after.ledger["lost"] == Count()
    assert begun == transcripts(before)
    assert list(held) == list(by_number(before.buffer.groups()))
    finished = by_number(g for b in after.batches for g in b.groups)
    for number, group in held.items():
        assert_same_samples(finished[number], group)
    for (number, index), tokens in begun.items():
        if number in finished:
            (sample,) = [s for s in finished[number].samples if s.index == index]
            assert sample.tokens[: len(tokens)].tolist() == tokens
    # What had been asked and answered is not asked again: no request has a prompt within what was there.
    known = {key: len(tokens) for key, tokens in begun.items()}
    for engine in after.engines:
        for request in engine.requests:
            number, _, index, _, _ = request.id.split(":")
            assert len(request.prompt) >= known.get((int(number), int(index)), 0)


def test_a_stopped_run_ends_in_the_same_samples_as_one_that_was_not(tmp_path):
    """Seeds depend on group, sample and turn alone. (Versions and order depend on time; here all are of version 0.)"""

    async def whole():
        world = build(PLAN)
        async with world.fleet, world.producer:
            return by_number((await world.buffer.take(0)).groups)

    async def first():
        stream, journal = Stream(), Journal(tmp_path)
        world = build(PLAN, journal, stream)
        async with world.fleet, world.producer:
            await asyncio.sleep(0.3)
        return save(world, stream, journal)

    async def second(saved):
        world, _, _ = await restore(PLAN, saved, tmp_path)
        async with world.fleet, world.producer:
            return by_number((await world.buffer.take(0)).groups)

    plain, resumed = virtual.run(whole()), virtual.run(second(virtual.run(first())))
    assert plain.keys() & resumed.keys()
    for number in plain.keys() & resumed.keys():
        assert_same_samples(plain[number], resumed[number])


def test_an_environment_that_is_another_one_now_costs_the_session_not_the_run(tmp_path):
    async def first():
        stream, journal = Stream(), Journal(tmp_path)
        world = build(PLAN, journal, stream)
        async with world.fleet, world.producer:
            await asyncio.sleep(0.25)
        return world, save(world, stream, journal)

    async def second(saved):
        world, _, _ = await restore(dataclasses.replace(PLAN, turns=2), saved, tmp_path)
        make = world.producer.environments
        world.producer.environments = lambda task: _renamed(make(task))
        async with world.fleet, world.producer:
            await runs.train(world, 2)
        return world

    before, saved = virtual.run(first())
    after = virtual.run(second(saved))
    begun = sum(s.transcript.num_written for s in before.producer.open.values())
    assert after.ledger["failed/environment_replay"].tokens == begun > 0
    assert after.ledger["failed"].samples == 0


def _renamed(environment):
    environment.task = dataclasses.replace(environment.task, question="other")
    return environment


def test_saving_while_a_batch_is_out_is_refused(tmp_path):
    async def main():
        world = build(PLAN)
        async with world.fleet, world.producer:
            await world.buffer.take(0)
            with pytest.raises(RuntimeError, match="a batch is out"):
                resume.get_state(world.producer)

    virtual.run(main())


# -------------------------------------------------------------------------------------------------------------- killed

KILLS = st.fixed_dictionaries(
    {
        "turns": st.integers(1, 3),
        "group_size": st.integers(1, 3),
        "collection": st.integers(1, 2),
        "lag": st.integers(1, 3),
        "mode": st.sampled_from(["barrier", "refresh"]),
        "seed": st.integers(0, 1000),
        "return_stale": st.booleans(),
        "faults": st.dictionaries(
            st.integers(0, 1),
            st.dictionaries(st.integers(0, 15), st.sampled_from(["dies_with_partial", "raises", "short"]), max_size=2),
            max_size=2,
        ),
        "environment_faults": st.dictionaries(st.integers(0, 40), st.just("raises"), max_size=2),
    }
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(KILLS, st.integers(0, 3), st.lists(st.floats(0.0, 0.9), min_size=1, max_size=2))
def test_after_a_kill_the_checkpoint_and_the_journal_are_all_there_is_and_all_is_used(changes, updates, lives):
    check_kills(Plan(filter_no_signal=False, **changes), updates, lives)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(KILLS, st.integers(0, 3), st.lists(st.floats(0.0, 0.9), min_size=1, max_size=3))
def test_many_kills(changes, updates, lives):
    check_kills(Plan(filter_no_signal=False, **changes), updates, lives)


def check_kills(plan: Plan, updates: int, lives: list[float]) -> None:
    """A checkpoint after `updates`; then processes that live so many seconds each, killed; then one to the end."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        saved = virtual.run(_until_checkpoint(plan, updates, directory))
        dead = [virtual.run(_until_killed(plan, saved, directory, seconds)) for seconds in lives]
        journaled = {e.number: e.group for e in read(directory, saved.segment)}
        at_checkpoint = {s["samples"][0]["group"] for s in unpack(saved.data)["buffered"]}
        world = virtual.run(_to_the_end(plan, saved, directory, [w.ledger.total for w in dead]))
    assert world.error is None
    assert runs.problems(world) == []
    world.ledger.check(world.holdings())
    # Nothing that was journaled or saved is generated again.
    asked = {int(r.id.split(":")[0]) for e in world.engines for r in e.requests}
    assert not asked & (journaled.keys() | at_checkpoint)
    # And it is all there: used, or waiting.
    used = by_number(g for b in world.batches for g in b.groups)
    ended = used | by_number(world.buffer.groups())
    stale = world.ledger["stale"].groups - Count(*saved.ledger["bins"].get("stale", (0, 0, 0))).groups
    missing = [n for n in (*journaled, *at_checkpoint) if n not in ended]
    assert len(missing) <= stale
    for number in journaled.keys() & ended.keys():
        assert_same_samples(journaled[number], ended[number])
    # The dead processes' totals are in the books, the rest of them as lost.
    most = Count(*(max(n) for n in zip(*(w.ledger.total for w in dead))))
    assert min(world.ledger.total.minus(most)) >= 0


async def _until_checkpoint(plan: Plan, updates: int, directory: Path) -> Checkpoint:
    stream, journal = Stream(), Journal(directory)
    world = build(plan, journal, stream)
    async with world.fleet, world.producer:
        await runs.train(world, updates)
        await asyncio.sleep(0.07)
        saved = save(world, stream, journal)
        assert world.error is None
    return saved


async def _until_killed(plan: Plan, saved: Checkpoint, directory: Path, seconds: float) -> World:
    """It leaves nothing but its journal. Its ledger, in memory, is what the next ones are held against."""
    world, _, _ = await restore(plan, saved, directory)
    async with world.fleet, world.producer:
        training = asyncio.create_task(runs.train(world, 100))
        await asyncio.sleep(seconds)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    return world


async def _to_the_end(plan: Plan, saved: Checkpoint, directory: Path, totals: list[Count]) -> World:
    world, _, _ = await restore(plan, saved, directory, *totals)
    async with world.fleet, world.producer:
        await runs.train(world, 6)
        await asyncio.sleep(0)
        world.check()
    return world
