"""Limits that are derived, gauges, and routing to the engine with the fewest requests."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.base import get_config, source
from rlx.config.parse import parse
from rlx.rollout import options, virtual
from rlx.rollout.budgets import Budgets, Gauge
from rlx.rollout.routing import LeastLoaded


def config(**changes):
    c = get_config()
    c.tasks.sources.sums = source(dataset="chain_sum")
    for key, value in changes.items():
        c.update_from_flattened_dict({key.replace("__", "."): value})
    return parse(c)


@pytest.mark.parametrize(
    "tasks, group, slots, explicit, samples",
    [
        (8, 8, 16, 0, 64),  # a collection
        (8, 8, 64, 0, 128),  # both sides of what the fleet runs at once
        (2, 6, 64, 0, 132),  # rounded up to a group
        (8, 8, 64, 1024, 1024),
    ],
)
def test_the_samples_under_way_follow_from_collection_and_fleet(tasks, group, slots, explicit, samples):
    c = config(rollout__tasks_per_update=tasks, rollout__group_size=group, producer__max_concurrent_samples=explicit)
    assert options.producer_options(c, slots).budgets == Budgets(sessions=96, samples=samples, groups=tasks)


def test_the_configuration_reaches_the_parts():
    c = config(
        producer__over_limit="cut", producer__stale_tasks="drop", rollout__truncated="mask",
        producer__retries=5, producer__http_admission=70, grader__workers=3, producer__session_token_limit=100,
    )  # fmt: skip
    rules = options.rules(c, max_lag=4)
    assert (rules.max_lag, rules.cut_long, rules.return_stale, rules.mask_truncated) == (4, True, False, True)
    assert rules.train_token_limit == c.learner.row_tokens
    assert options.rules(config(producer__train_token_limit=99), 0).train_token_limit == 99
    fleet = options.fleet_options(c)
    assert (fleet.http_admission, fleet.outage_s) == (70, 300.0)
    made = options.producer_options(c, 64)
    assert (made.gradings, made.session_token_limit, made.retries) == (3, 100, 5)


def test_a_gauge_integrates_over_time():
    async def main():
        await asyncio.sleep(100)  # before it is used
        gauge = Gauge()
        first = gauge.enter()
        await asyncio.sleep(2)
        second = gauge.enter()
        await asyncio.sleep(2)
        gauge.leave(first)
        await asyncio.sleep(4)
        one = gauge.take()
        gauge.leave(second)
        await asyncio.sleep(2)
        return one, gauge.take(), gauge.take(), gauge.level

    one, two, three, level = virtual.run(main())
    assert one == {"occupancy": (2 * 1 + 2 * 2 + 4 * 1) / 8, "peak": 2.0, "seconds": 4.0}
    assert two == {"occupancy": 0.0, "peak": 1.0, "seconds": 6.0}
    assert three == {"occupancy": 0.0, "peak": 0.0}
    assert level == 0


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 6) | st.none()), max_size=60))
def test_the_least_loaded_is_found_whatever_happened(events):
    routing, loads, order = LeastLoaded(), {}, 0
    for member, load in events:
        if load is None:
            routing.discard(member)
            loads.pop(member, None)
        else:
            order += 1
            routing.set(member, load)
            loads[member] = (load, order)
        assert len(routing) == len(loads)
        assert (member in routing) == (load is not None)
        if loads:
            assert routing.least() == min(loads, key=loads.get)
        else:
            with pytest.raises(IndexError):
                routing.least()
