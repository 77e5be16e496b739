"""Random runs with random faults: whatever happens, the books balance at every step and nothing is trained wrongly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlx.rollout.fleet import FleetDown
from rlx.rollout.producer import TooManyFailures
from rlx.rollout.virtual import DeadlockError
from tests.rollout import runs
from tests.rollout.runs import Plan
from tests.rollout.scripted import FAULTS

FEW = {"max_size": 3}
PLANS = st.builds(
    Plan,
    engines=st.integers(1, 3),
    admission=st.integers(1, 3),
    mode=st.sampled_from(["barrier", "refresh", "drain"]),
    group_size=st.integers(1, 4),
    collection=st.integers(1, 3),
    lag=st.integers(0, 3),
    sessions=st.integers(1, 9),
    samples=st.integers(1, 12),
    updates=st.integers(1, 4),
    train_s=st.sampled_from([0.0, 0.05, 0.3]),
    turns=st.integers(1, 3),
    session_token_limit=st.sampled_from([0, 0, 12, 20]),
    train_token_limit=st.sampled_from([1000, 1000, 14]),
    cut_long=st.booleans(),
    mask_truncated=st.booleans(),
    filter_no_signal=st.booleans(),
    return_stale=st.booleans(),
    head_size=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**16),
    faults=st.dictionaries(
        st.integers(0, 2), st.dictionaries(st.integers(0, 20), st.sampled_from(FAULTS), **FEW), **FEW
    ),
    bad_loads=st.dictionaries(
        st.integers(0, 2),
        st.dictionaries(st.integers(0, 4), st.sampled_from(["hangs", "raises", "keeps_version"]), **FEW),
        **FEW,
    ),
    grader_faults=st.dictionaries(
        st.integers(0, 30), st.sampled_from(["hangs", "raises", "nan", "timeout", "error"]), **FEW
    ),
    environment_faults=st.dictionaries(st.integers(0, 40), st.sampled_from(["hangs", "raises"]), **FEW),
)


def check(plan: Plan) -> None:
    world = runs.run(plan)
    # Engines that never answer again end a run; so do as many samples in a row that fail for good.
    assert world.error is None or isinstance(world.error, FleetDown | TooManyFailures), world.error
    assert runs.problems(world) == []
    assert world.error is not None or len(world.batches) == plan.updates
    again = runs.run(plan)
    assert again.ledger.trace == world.ledger.trace
    assert repr(again.error) == repr(world.error)


RULES = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, **RULES)
@given(PLANS)
def test_random_runs(plan):
    check(plan)


@pytest.mark.slow
@settings(max_examples=1000, **RULES)
@given(PLANS)
def test_a_thousand_random_runs(plan):
    check(plan)


def test_a_run_without_faults_trains_everything_it_should():
    world = runs.run(Plan(updates=6, filter_no_signal=False))
    assert world.error is None
    assert runs.problems(world) == []
    assert world.ledger["trained"].groups == 12
    assert world.ledger["failed"].tokens == 0
    assert not isinstance(world.error, DeadlockError)
