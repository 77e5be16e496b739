"""Samples are submitted within the limits, survive what can be survived, and end in a bin or end the run."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.metrics.ledger import Count
from rlx.metrics.names import check_names
from rlx.rollout import virtual
from rlx.rollout.engine import RequestRefused
from rlx.rollout.fleet import FleetDown
from rlx.rollout.producer import TooManyFailures
from rlx.rollout.report import age_shares, take_scalars
from rlx.rollout.session import EnvironmentFailed
from rlx.types import StopReason
from tests.rollout import runs
from tests.rollout.runs import Plan

PLAIN = Plan(engines=1, admission=4, filter_no_signal=False, updates=3)


def run(plan: Plan, **changes) -> runs.World:
    """A whole run whose books balance."""
    world = runs.run(dataclasses.replace(plan, **changes))
    assert runs.problems(world) == []
    return world


def produce(plan: Plan, seconds: float, prepare=lambda world: None, look=lambda world: None):
    """Without a trainer, for some time: (world, what `look` saw in it)."""

    async def main():
        world = runs.build(plan)
        prepare(world)
        async with world.fleet, world.producer:
            await asyncio.sleep(seconds)
            world.check()
            seen = look(world)
        return world, seen

    world, seen = virtual.run(main())
    assert world.error is None
    return world, seen


# ---------------------------------------------------------------------------------------------------------- submission


@pytest.mark.parametrize(
    "sessions, samples, most", [(5, 100, (5, 5)), (100, 7, (7, 7)), (4, 100, (4, 4)), (100, 100, (18, 18))]
)
def test_sessions_and_samples_stay_within_their_limits(sessions, samples, most):
    """The last: 3 samples a group, (2 + 1) x 2 groups can be trained in time."""
    plan = dataclasses.replace(PLAIN, sessions=sessions, samples=samples)
    _, seen = produce(plan, 0.001, look=lambda w: (w.producer.sessions.peak, w.producer.samples.peak))
    assert seen == most


def test_a_sample_that_is_graded_makes_room_not_its_group():
    """Four sessions, groups of three: when the shortest response ends, a sample of the next group begins."""
    plan = dataclasses.replace(PLAIN, sessions=4, samples=4, group_size=3)
    submitted = lambda w: [r.id.split(":")[::2][:2] for r in w.engines[0].requests]  # noqa: E731
    _, first = produce(plan, 0.001, look=submitted)
    assert first == [["0", "0"], ["0", "1"], ["0", "2"], ["1", "0"]]
    world, later = produce(plan, 0.1, look=submitted)
    assert later[4:6] == [["1", "1"], ["1", "2"]]
    assert 0 in world.producer.groups


def test_slow_graders_hold_back_submission():
    """Sessions that wait for a grade are closed, but their samples are under way."""
    plan = dataclasses.replace(PLAIN, sessions=100, samples=9)
    world, _ = produce(plan, 0.5, prepare=lambda w: setattr(w.graders, "seconds", 100.0))
    assert (world.graders.most_running, len(world.engines[0].requests)) == (2, 9)
    assert (world.producer.sessions.level, world.producer.samples.peak) == (0, 9)


def test_a_full_buffer_lets_no_group_begin():
    """And those that have begun are finished: nothing is thrown away."""
    world, _ = produce(dataclasses.replace(PLAIN, sessions=6, samples=6), 50.0)
    assert len(world.buffer) >= PLAIN.collection
    assert world.producer.groups == {}
    assert world.ledger["buffered"] == world.ledger.total
    again, _ = produce(dataclasses.replace(PLAIN, sessions=6, samples=6), 5000.0)
    assert again.ledger.trace == world.ledger.trace


def test_requests_of_a_sample_have_seeds_of_their_own():
    world = run(PLAIN, turns=3, faults={0: {4: "dies_with_partial"}})
    seeds = [r.seeds for r in world.engines[0].requests]
    ids = [r.id for r in world.engines[0].requests]
    assert len(set(ids)) == len(set(seeds))
    assert len({id_ for id_ in ids if id_.startswith("0:")}) >= 9


# -------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("turns", [1, 3])
def test_a_response_goes_on_elsewhere_from_its_own_tokens(turns):
    plan = dataclasses.replace(PLAIN, engines=2, faults={0: {0: "dies_with_partial"}}, turns=turns, head_size=3)
    world = run(plan)
    first, second = (e.requests for e in world.engines)
    broken = first[0]
    (goes_on,) = [r for r in [*first[1:], *second] if r.id.rpartition(":")[0] == broken.id.rpartition(":")[0]][:1]
    saved = int(goes_on.id.rpartition(":")[2])
    assert saved > 0
    assert len(goes_on.prompt) == len(broken.prompt) + saved
    np.testing.assert_array_equal(goes_on.prompt[: len(broken.prompt)], broken.prompt)
    assert goes_on.max_new_tokens == broken.max_new_tokens - saved
    assert world.ledger["failed"].tokens == 0


FAULTS = ["dies", "raises", "hangs", "hangs_deaf", "short", "positive", "shifted_head", "nonfinite", "duplicate_ids",
          "two_answers", "wrong_version", "old_version", "empty", "none", "aborts"]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_sample(fault):
    world = run(PLAIN, engines=2, head_size=2, faults={0: {1: fault}, 1: {2: fault}}, updates=4, train_s=1.0)
    assert world.error is None
    assert world.ledger["trained"].groups == 8
    assert world.ledger["failed"].samples == 0
    if fault == "aborts":
        assert not world.fleet.ejected
    else:
        assert sum(world.fleet.ejected.values()) == 2


@pytest.mark.parametrize("first", [0, 2])
def test_a_response_that_fails_again_and_again_fails_its_sample(first):
    """Three requests in a row are of one response: two retries. Its group goes on without it, or is complete."""
    faults = dict.fromkeys(range(first, first + 3), "raises")
    world = run(PLAIN, sessions=1, samples=1, faults={0: faults})
    assert world.error is None
    assert world.ledger["failed/engine_exception"] == Count(0, 1, 0)
    assert world.producer.failures["engine_exception"] == 3
    sizes = [len(g.samples) for b in world.batches for g in b.groups]
    assert sizes == [2, 3, 3, 3, 3, 3]


def test_a_group_whose_samples_all_fail_is_a_failed_group():
    world = run(PLAIN, sessions=1, samples=1, group_size=1, retries=0, faults={0: {0: "raises"}})
    assert world.ledger["failed"] == Count(0, 1, 1)
    assert [g.samples[0].group for b in world.batches for g in b.groups] == [1, 2, 3, 4, 5, 6]


def test_a_request_that_no_engine_can_serve_fails_its_sample_alone():
    def prepare(world):
        generate = world.engines[0].generate

        async def choosy(request):
            if request.id.startswith("0:") and ":1:0:" in request.id:
                raise RequestRefused("too long")
            return await generate(request)

        world.engines[0].generate = choosy

    world, _ = produce(PLAIN, 1.0, prepare)
    assert world.ledger["failed/engine_refused"] == Count(0, 1, 0)
    assert world.producer.failures["engine_refused"] == 1
    assert not world.fleet.ejected


def test_without_engines_the_run_ends_with_the_error():
    world = run(PLAIN, bad_loads={0: dict.fromkeys(range(99), "raises")}, updates=8)
    assert isinstance(world.error, FleetDown)
    assert "cannot load" in str(world.error)


def test_too_many_failures_in_a_row_end_the_run_with_the_last():
    world = run(PLAIN, turns=2, failure_limit=4, retries=0, environment_faults=dict.fromkeys(range(99), "raises"))
    assert isinstance(world.error, TooManyFailures)
    assert isinstance(world.error.__cause__, EnvironmentFailed)
    assert "samples in a row failed for good (producer.failure_limit); the last one" in str(world.error)
    assert "the sandbox broke" in str(world.error)
    assert world.ledger["failed/environment_error"].samples >= 4


def test_gradings_without_a_verdict_count_as_failures_in_a_row():
    world = run(PLAIN, failure_limit=4, grader_faults=dict.fromkeys(range(99), "timeout"))
    assert "grading failed" in str(world.error)
    assert world.producer.failures["grader_timeout"] == 4


def test_failures_with_successes_between_do_not():
    faults = dict.fromkeys(range(0, 99, 2), "timeout")
    assert run(PLAIN, failure_limit=2, sessions=1, samples=1, grader_faults=faults).error is None


def test_a_defect_ends_the_run():
    """Whatever is no failure of engine, environment or grader is ours."""

    async def main():
        world = runs.build(PLAIN)
        world.producer.environments = lambda task: 1 / 0
        async with world.fleet, world.producer:
            with pytest.raises(ZeroDivisionError):
                await world.buffer.take(0)

    virtual.run(main())


# --------------------------------------------------------------------------------------------- environments and graders


@pytest.mark.parametrize("fault, reason", [("hangs", "environment_timeout"), ("raises", "environment_error")])
def test_a_session_whose_environment_fails_begins_anew(fault, reason):
    """Call 8 is a step after a response: its tokens are booked as failed, the sample is not."""
    world = run(PLAIN, turns=2, sessions=1, samples=1, environment_faults={1: fault})
    assert world.error is None
    assert world.producer.failures == {reason: 1}
    failed = world.ledger[f"failed/{reason}"]
    assert failed.tokens > 0
    assert failed._replace(tokens=0) == Count()
    assert world.ledger["trained"].samples == 18


@pytest.mark.parametrize("fault, kind", [("hangs", "timeout"), ("raises", "error"), ("nan", "nonsense")])
def test_a_grading_is_tried_again(fault, kind):
    world = run(PLAIN, grader_faults={0: fault, 3: fault})
    assert world.producer.failures == {f"grader_{kind}": 2}
    assert world.ledger["trained"].samples == 18
    again = run(PLAIN, grader_faults=dict.fromkeys(range(3), fault), sessions=1, samples=1)
    assert again.ledger[f"failed/grader_{kind}"].samples == 1


def test_no_more_gradings_run_than_there_are_graders():
    assert run(PLAIN, updates=4, sessions=20, samples=20).graders.most_running == 2


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_session_at_its_limit_is_graded_on_its_work_so_far():
    world = run(PLAIN, turns=3, session_token_limit=14)
    stops = {s.stop_reason for b in world.batches for s in b.samples}
    assert StopReason.SESSION_LIMIT in stops
    for batch in world.batches:
        for sample in batch.samples:
            if sample.stop_reason is StopReason.SESSION_LIMIT:
                assert sample.mask[-1]
                assert "turns" in sample.text
    assert world.error is None


def test_a_prompt_that_leaves_no_room_fails_its_sample():
    world = run(PLAIN, turns=3, session_token_limit=5, failure_limit=7)
    assert "a prompt of 5 tokens leaves no room for a response (producer.session_token_limit)" in str(world.error)
    assert world.ledger["failed/prompt_too_long"].samples >= 7


def test_a_response_that_was_cut_has_its_reason_whatever_happened_on_the_way():
    """An engine dies with all tokens written but one: the last comes from elsewhere."""

    async def main():
        world = runs.build(dataclasses.replace(PLAIN, engines=2, group_size=1))
        for engine in world.engines:
            engine.lengths = (12, 12)
        world.engines[0]._fault = {0: "dies_with_partial"}.get
        world.engines[0]._written = lambda job: 12
        async with world.fleet, world.producer:
            return [s for g in (await world.buffer.take(0)).groups for s in g.samples]

    samples = virtual.run(main())
    assert [(s.stop_reason, s.num_written) for s in samples] == [(StopReason.LENGTH, 12)] * 2


# ---------------------------------------------------------------------------------------------------------- staleness


@pytest.mark.parametrize("returned", [True, False])
def test_stale_tasks_go_back_or_do_not(returned):
    """A trainer that publishes three versions between two batches makes everything stale."""

    async def main():
        world = runs.build(dataclasses.replace(PLAIN, lag=1, return_stale=returned, updates=0))
        async with world.fleet, world.producer:
            await asyncio.sleep(2)
            world.version = 5
            await world.publisher.publish("weights 5", 5)
            await runs.train(world, 2)
        return world

    world = virtual.run(main())
    stale = world.ledger["stale"]
    assert stale.groups >= 2
    groups = [g for b in world.batches for g in b.groups]
    again = [g.samples[0].group for g in groups if g.samples[0].group >= 2**40]
    assert bool(again) == returned
    if returned:
        assert sorted(again[:2]) == [2**40, 2**40 + 1]
        assert {g.task.id for g in groups[:2]} == {"sums/0", "sums/1"}


# -------------------------------------------------------------------------------------------------------------- the end


def test_stopping_leaves_everything_held_and_nothing_running():
    async def main():
        world = runs.build(dataclasses.replace(PLAIN, turns=2, faults={0: {3: "hangs_deaf"}}))
        async with world.fleet, world.producer:
            await asyncio.sleep(0.2)
        world.check()
        await asyncio.sleep(10)
        return world, asyncio.all_tasks() - {asyncio.current_task()}

    world, left = virtual.run(main())
    assert world.error is None
    assert world.ledger["in_flight"].tokens > 0
    assert [t.get_coro().__qualname__ for t in left] == ["ScriptedEngine.generate"]


def test_every_metric_is_listed():
    plan = dataclasses.replace(PLAIN, faults={0: {1: "raises"}})
    _, seen = produce(plan, 3.0, look=lambda w: take_scalars(w.producer))
    check_names(seen)
    assert seen["engine/ejections_exception"] == seen["producer/failures_engine_exception"] == 1
    assert 0 < seen["engine/occupancy"] <= 1
    assert seen["producer/sessions_seconds"] > 0
    assert seen["producer/buffer_peak"] >= PLAIN.collection


def test_ages_are_shares_by_bin():
    shares = age_shares({0: 2, 3: 1, 5: 4, 20: 1})
    check_names(shares)
    assert shares["offpolicy/age_share_0"] == 0.25
    assert shares["offpolicy/age_share_4-7"] == 0.5
    assert shares["offpolicy/age_share_16+"] == 0.125
    assert sum(shares.values()) == 1
    assert age_shares({}) == {}
