"""Graded groups wait, are found too old or without signal or too long, and become a batch; every token is booked."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.metrics.ledger import Count, Ledger
from rlx.rollout import virtual
from rlx.rollout.buffer import Buffer, StaleError
from rlx.rollout.fates import Rules, ages, fate, shortened
from rlx.types import StopReason
from tests.records import make_group, make_sample

RULES = Rules(
    collection=2,
    max_lag=2,
    filter_no_signal=True,
    mask_truncated=False,
    train_token_limit=100,
    cut_long=False,
    return_stale=True,
)


def buffer(**changes) -> tuple[Buffer, Ledger]:
    ledger = Ledger()
    return Buffer(dataclasses.replace(RULES, **changes), ledger), ledger


def put(held: Buffer, ledger: Ledger, *groups, version=0):
    for group in groups:
        ledger.generated(sum(s.num_written for s in group.samples), len(group.samples), 1)
        held.put(group, version)
        ledger.check(held.holdings())


def written_at(version: int, number: int = 0, rewards=(0, 1), **changes):
    """A group of samples of 4 tokens, all of one version."""
    return make_group(rewards, group=number, spans=[(version, 3, 7)], **changes)


def numbers(batch):
    return [g.samples[0].group for g in batch.groups]


def test_a_collection_is_taken_in_order_of_arrival():
    async def main():
        held, ledger = buffer()
        put(held, ledger, *(written_at(0, n) for n in (5, 3, 9)))
        batch = await held.take(1)
        ledger.check(held.holdings())
        assert ledger["buffered"] == Count(24, 6, 3)
        held.done(batch, applied=True)
        return numbers(batch), ledger, len(held)

    taken, ledger, left = virtual.run(main())
    assert (taken, left) == ([5, 3], 1)
    assert (ledger["trained"], ledger["buffered"]) == (Count(16, 4, 2), Count(8, 2, 1))
    assert ledger.get_state()["tokens_by_age"] == {"trained": [0, 16, 0, 0, 0, 0, 0]}
    assert ledger.get_state()["samples_by_length"] == {"trained": [4, 0, 0, 0, 0, 0]}


def test_it_waits_for_a_collection():
    async def main():
        held, ledger = buffer()
        put(held, ledger, written_at(0, 0))
        job = asyncio.create_task(held.take(0))
        await asyncio.sleep(1)
        waiting = not job.done()
        put(held, ledger, written_at(0, 1))
        return waiting, numbers(await job)

    assert virtual.run(main()) == (True, [0, 1])


@pytest.mark.parametrize("returned", [True, False])
def test_a_group_older_than_the_lag_is_discarded_when_its_turn_comes(returned):
    """Its oldest token counts. It is stale for the version that takes, not for the one that it arrived at."""

    async def main():
        held, ledger = buffer(return_stale=returned)
        again = []
        held.on_stale = again.append
        old = make_group((0, 1), group=0, spans=[(1, 3, 5), (4, 5, 7)])
        put(held, ledger, old, *(written_at(2, n) for n in (1, 2, 3)))
        assert ledger["stale"] == Count()
        batch = await held.take(4)
        return numbers(batch), [g.samples[0].group for g in again], ledger, batch

    taken, again, ledger, batch = virtual.run(main())
    assert taken == [1, 2]
    assert again == ([0] if returned else [])
    assert ledger["stale"] == Count(8, 2, 1)
    assert ledger.get_state()["tokens_by_age"]["stale"] == [4, 0, 0, 4, 0, 0, 0]
    assert batch.check_ages(4, 2) is None
    with pytest.raises(StaleError, match="of group 1 has a token of version 2, 3 updates old; max_policy_lag is 2"):
        batch.check_ages(5, 2)


def test_arrivals_are_checked_as_well():
    async def main():
        held, ledger = buffer(max_lag=0)
        job = asyncio.create_task(held.take(3))
        await asyncio.sleep(1)
        put(held, ledger, *(written_at(v, n) for n, v in enumerate((3, 2, 3))))
        return numbers(await job), ledger["stale"].groups

    assert virtual.run(main()) == ([0, 2], 1)


def test_what_waits_was_fit_for_an_older_version_only():
    """A take that is cancelled has looked at groups already; the next one is of a later version."""

    async def main():
        held, ledger = buffer(max_lag=1)
        put(held, ledger, written_at(0, 0))
        job = asyncio.create_task(held.take(1))
        await asyncio.sleep(1)
        job.cancel()
        put(held, ledger, *(written_at(2, n) for n in (1, 2)))
        return numbers(await held.take(2)), ledger["stale"].groups

    assert virtual.run(main()) == ([1, 2], 1)


def test_groups_of_a_later_version_wait_for_it():
    """They are of a journal: the updates between are not made again yet."""

    async def main():
        held, ledger = buffer()
        put(held, ledger, written_at(5, 0), written_at(4, 1), written_at(4, 2), written_at(5, 3))
        first = await held.take(4)
        held.done(first, applied=True)
        ledger.check(held.holdings())
        full = held.full
        return numbers(first), full, numbers(await held.take(5))

    assert virtual.run(main()) == ([1, 2], False, [0, 3])


def test_room_that_groups_of_a_later_version_leave_is_told():
    """After a resumption they fill the buffer until the learner asks: whoever found no room then must hear of it."""

    async def main():
        held, ledger = buffer()
        put(held, ledger, *(written_at(3, n) for n in (5, 9)), version=3)
        room = []
        held.on_change = lambda: room.append(held.room_for(0))
        assert not held.room_for(0)
        waiting = asyncio.create_task(held.take(0))
        await asyncio.sleep(1)
        assert room[-1]
        put(held, ledger, *(written_at(0, n) for n in (6, 7)))
        return numbers(await waiting)

    assert virtual.run(main()) == [6, 7]


def test_an_update_that_was_not_finite_fails_its_samples():
    async def main():
        held, ledger = buffer()
        put(held, ledger, *(written_at(0, n) for n in range(2)))
        held.done(await held.take(0), applied=False)
        return held.consumed_ages, ledger

    consumed, ledger = virtual.run(main())
    assert (ledger["failed/nonfinite_update"], ledger["trained"]) == (Count(16, 4, 2), Count())
    assert not consumed


def test_consumed_ages_are_of_the_trained_tokens_only():
    async def main():
        held, ledger = buffer()
        put(held, ledger, written_at(0, 0, rewards=(1, 1)), written_at(1, 1))
        held.done(await held.take(2), applied=True)
        return held.consumed_ages

    assert virtual.run(main()) == {1: 8}


def test_one_batch_is_out_at_a_time():
    async def main():
        held, ledger = buffer()
        put(held, ledger, *(written_at(0, n) for n in range(4)))
        batch = await held.take(0)
        with pytest.raises(RuntimeError, match="not done with"):
            await held.take(0)
        with pytest.raises(RuntimeError, match="a batch is out"):
            held.groups()
        held.done(batch, applied=True)
        with pytest.raises(RuntimeError, match="once"):
            held.done(batch, applied=True)

    virtual.run(main())


def test_what_ends_the_producer_ends_the_wait():
    async def main():
        held, _ = buffer()
        job = asyncio.create_task(held.take(0))
        await asyncio.sleep(1)
        held.fail(OSError("first"))
        held.fail(OSError("second"))
        for wait in (job, held.take(0)):
            with pytest.raises(OSError, match="first"):
                await wait

    virtual.run(main())


def test_it_says_when_groups_have_left():
    async def main():
        held, ledger = buffer(max_lag=0)
        calls = []
        held.on_change = lambda: calls.append(len(held))
        put(held, ledger, *(written_at(0, n) for n in range(2)))
        assert held.full
        put(held, ledger, *(written_at(1, n) for n in range(2, 5)))
        await held.take(1)
        return calls, held.full

    calls, full = virtual.run(main())
    assert calls[-1] == 1
    assert not full


@pytest.mark.parametrize(
    "waiting, open_groups, room", [(0, 5, True), (0, 6, False), (1, 4, True), (1, 5, False), (2, 0, False)]
)
def test_no_group_begins_that_would_be_stale_at_its_turn(waiting, open_groups, room):
    """Two at a time and a lag of 2: the sixth from now is the last that is trained in time."""

    async def main():
        held, ledger = buffer()
        put(held, ledger, *(written_at(0, n) for n in range(waiting)))
        return held.room_for(open_groups)

    assert virtual.run(main()) is room


# --------------------------------------------------------------------------------------------------------------- rules


def outcome_of(*samples_outcomes, **changes):
    samples = tuple(make_sample(0, i, reward=r, outcome=o) for i, (r, o) in enumerate(samples_outcomes))
    return dataclasses.replace(make_group((0, 1)), samples=samples, **changes)


def test_failed_gradings_are_booked_at_once_and_stay_in_the_group():
    async def main():
        held, ledger = buffer(collection=1)
        put(held, ledger, outcome_of((0, "timeout"), (1, "graded"), (0, "error"), (0, "graded")), version=3)
        batch = await held.take(0)
        return ledger, batch

    ledger, batch = virtual.run(main())
    assert ledger["failed/grader_timeout"] == ledger["failed/grader_error"] == Count(4, 1, 0)
    assert ledger["buffered"] == Count(8, 2, 1)
    assert (len(batch.samples), len(batch.groups[0].samples)) == (2, 4)
    assert ledger.get_state()["tokens_by_age"]["failed/grader_error"] == [0, 0, 0, 4, 0, 0, 0]


def test_a_group_without_any_grade_never_waits():
    async def main():
        held, ledger = buffer()
        put(held, ledger, outcome_of((0, "timeout"), (0, "error")))
        return len(held), ledger

    waiting, ledger = virtual.run(main())
    assert waiting == 0
    assert (ledger["failed"], ledger["buffered"]) == (Count(8, 2, 1), Count())


@pytest.mark.parametrize(
    "rewards, filtered, trained, bins",
    [
        ((0, 0), True, 0, {"no_signal": 2}),
        ((0, 0), False, 2, {}),
        ((0, 1), True, 2, {}),
        ((1,), True, 0, {"no_signal": 1}),
    ],
)
def test_no_signal(rewards, filtered, trained, bins):
    end = fate(make_group(rewards), dataclasses.replace(RULES, filter_no_signal=filtered))
    assert len(end.trained) == trained
    assert {name: len(samples) for name, samples in end.dropped.items()} == bins


@pytest.mark.parametrize("stop, masked", [(StopReason.LENGTH, True), (StopReason.SESSION_LIMIT, False)])
def test_truncated_responses_can_be_kept_out_of_the_loss(stop, masked):
    group = make_group((0, 1), stop=stop)
    end = fate(group, dataclasses.replace(RULES, mask_truncated=True))
    assert (len(end.trained), len(end.dropped.get("masked", []))) == ((0, 2) if masked else (2, 0))
    assert len(fate(group, RULES).trained) == 2


@pytest.mark.parametrize("cut", [True, False])
def test_long_samples_are_dropped_or_cut_and_counted(cut):
    """Samples of 3 + 4 tokens; the limit leaves 2 of the 4."""

    async def main():
        held, ledger = buffer(collection=1, train_token_limit=5, cut_long=cut)
        put(held, ledger, written_at(1, 0, head_size=2))
        batch = await held.take(2)
        ledger.check(held.holdings())
        held.done(batch, applied=True)
        return batch, ledger

    batch, ledger = virtual.run(main())
    if not cut:
        assert (batch.samples, ledger["too_long"], ledger["trained"]) == ((), Count(8, 2, 1), Count())
        return
    assert (ledger["too_long"], ledger["trained"]) == (Count(4, 0, 0), Count(4, 2, 1))
    assert ledger.get_state()["tokens_by_age"] == {"too_long": [0, 4, 0, 0, 0, 0, 0], "trained": [0, 4, 0, 0, 0, 0, 0]}
    sample, whole = batch.samples[0], batch.groups[0].samples[0]
    assert (len(whole.tokens), len(sample.tokens), sample.num_written) == (7, 5, 2)
    np.testing.assert_array_equal(sample.logprobs, whole.logprobs[:5])
    np.testing.assert_array_equal(sample.head.ids, whole.head.ids[:2])


def test_a_cut_that_leaves_nothing_written_drops():
    end = fate(make_group((0, 1)), dataclasses.replace(RULES, train_token_limit=3, cut_long=True))
    assert (end.trained, len(end.dropped["too_long"])) == ((), 2)


def test_spans_end_where_the_sample_is_cut():
    sample = make_sample(spans=[(1, 3, 5), (2, 5, 7)])
    spans = lambda s: [dataclasses.astuple(v) for v in s.version_spans]  # noqa: E731
    assert spans(shortened(sample, 6)) == [(1, 3, 5), (2, 5, 6)]
    assert spans(shortened(sample, 5)) == [(1, 3, 5)]
    assert ages([shortened(sample, 6)], 4) == {3: 2, 2: 1}
