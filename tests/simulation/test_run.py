"""A simulated run keeps its books, obeys the laws of queues, and is the same every time."""

from __future__ import annotations

import dataclasses
import json

import pytest

from configs import base
from rlx.config.errors import ConfigError
from rlx.simulation.run import coarse, simulate
from tests.simulation.small import config, hidden

PLAIN = {  # a trainer of 4 s, sessions of one turn
    "simulate__trainer__update_seconds": 4.0,
    "simulate__sessions__grade_seconds": base.distribution(kind="gamma", mean=0.5, cv=0.5),
    "grader__workers": 64,
    "rollout__filter_no_signal": False,  # every collection is trained on
}
QUICK = PLAIN | {"simulate__trainer__update_seconds": 0.01, "producer__max_policy_lag": 8}


def test_the_same_configuration_gives_the_same_answer():
    first, again, other = (json.dumps(simulate(config(run__seed=s, **PLAIN)).to_json()) for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_figures_are_those_of_the_updates_after_the_first():
    result = simulate(config(**PLAIN))
    counted = result.updates[3:]
    assert len(result.updates) == 24
    seconds = [u.ended - u.began for u in counted]
    assert result.update_minutes == pytest.approx(sum(seconds) / len(seconds) / 60)
    assert result.trainer_wait_share == pytest.approx(sum(u.taken - u.began for u in counted) / sum(seconds))
    assert result.train_minutes * 60 == pytest.approx(4.0)
    assert sum(result.ages.values()) == pytest.approx(1.0)
    assert result.age_mean == pytest.approx(sum(age * share for age, share in result.ages.items()))
    assert result.hours * 3600 == pytest.approx(result.updates[-1].ended)


def test_every_token_is_in_a_bin_and_what_was_trained_is_what_the_updates_had():
    records = []
    result = simulate(config(**PLAIN, simulate__token_grain=2), records.append)
    assert result.tokens["trained"] == sum(u.trained_tokens for u in result.updates)
    written = 2 * sum(r["tokens"] for r in records if r["kind"] == "response")
    assert 0 <= written - sum(result.tokens.values()) <= 2 * 16 * 512  # an answer may be cut off at the end
    assert result.groups["trained"] == sum(1 for _ in range(result.groups["trained"]))
    assert set(result.tokens) >= {"trained", "stale", "no_signal", "too_long", "failed", "in_flight", "buffered"}


def test_sessions_obey_littles_law():
    """Open sessions = sessions opened a second x the seconds that each is open."""
    result = simulate(config(**QUICK, learner__updates=80))
    levels = result.timeline.values["sessions"][5:]
    per_second = 16 / (result.update_minutes * 60)
    assert result.stale_share < 0.02
    assert result.session_minutes * 60 * per_second == pytest.approx(sum(levels) / len(levels), rel=0.1)


def test_a_trainer_that_is_slow_never_waits_and_a_fast_one_always_does():
    slow = simulate(config(**(PLAIN | {"simulate__trainer__update_seconds": 60.0})))
    fast = simulate(config(**QUICK))
    assert slow.trainer_wait_share == pytest.approx(0.0, abs=1e-9)
    assert slow.update_minutes == pytest.approx(1.0)
    assert slow.engine_occupancy < 0.2 < 0.7 < fast.engine_occupancy
    assert fast.trainer_wait_share > 0.98


def test_no_token_is_older_than_the_lag_allows_and_lag_0_trains_on_fresh_ones():
    balanced = PLAIN | {"simulate__trainer__update_seconds": 1.0, "producer__sessions_in_flight": 48}
    results = {lag: simulate(config(**balanced, producer__max_policy_lag=lag)) for lag in (0, 1, 2, 4)}
    assert all(result.age_max <= lag for lag, result in results.items())
    assert results[0].ages == {0: 1.0}
    assert results[0].update_minutes > results[1].update_minutes > results[4].update_minutes
    assert results[0].age_mean < results[1].age_mean < results[4].age_mean


@pytest.mark.parametrize("publication", ["barrier", "refresh", "drain"])
def test_publications_cost_what_they_should(publication):
    load = {
        "simulate__engines__load_seconds": 2.0,
        "simulate__engines__count": 2,
        "simulate__trainer__publish_seconds": 0.5,
    }
    result = simulate(config(**QUICK, **load, producer__publication=publication))
    seconds = result.publish_minutes * 60
    if publication == "drain":  # it returns at once
        assert seconds == pytest.approx(0.5)
    elif publication == "refresh":
        assert seconds == pytest.approx(2.5)
    else:  # what runs comes to its end first
        assert 2.6 < seconds < 6.0


def test_engines_that_die_and_graders_that_fail_are_in_the_books():
    faults = {
        "simulate__faults__engine_failures_per_hour": 60.0,
        "simulate__faults__engine_down_seconds": 10.0,
        "simulate__faults__failed_gradings": 0.1,
        "simulate__engines__count": 4,
        "producer__retries": 8,
    }
    healthy, ill = simulate(config(**PLAIN)), simulate(config(**PLAIN, **faults, learner__updates=60))
    assert healthy.tokens["failed"] == 0
    ended = sum(n for name, n in ill.tokens.items() if name not in ("in_flight", "buffered"))
    assert ill.tokens["failed/grader_error"] / ended == pytest.approx(0.1, abs=0.03)


def test_the_trace_is_that_of_a_run():
    records = []
    result = simulate(hidden(learner__updates=6), records.append)
    kinds = [r["kind"] for r in records]
    assert kinds.count("update") == 6
    assert kinds.count("load") == 6
    updates = [r for r in records if r["kind"] == "update"]
    assert [u["ended"] for u in updates] == [u.ended for u in result.updates]
    assert sum(u["trained"] - u["taken"] for u in updates[3:]) / 180 == pytest.approx(result.train_minutes)
    session = next(r for r in records if r["kind"] == "session")
    assert len(session["responses"]) == len(session["observations"]) + 1 == len(session["tool_seconds"]) + 1
    assert json.dumps(records)


def test_a_grain_changes_the_answer_little():
    changes = {**PLAIN, "simulate__sessions__response_tokens": base.distribution(kind="lognormal", mean=200.0, cv=0.5)}
    fine, grained = (simulate(config(**changes, simulate__token_grain=grain)) for grain in (1, 8))
    assert grained.update_minutes == pytest.approx(fine.update_minutes, rel=0.03)
    assert grained.age_mean == pytest.approx(fine.age_mean, rel=0.1)
    assert sum(grained.tokens.values()) == pytest.approx(sum(fine.tokens.values()), rel=0.03)


def test_a_coarse_configuration_has_the_same_seconds_and_fewer_tokens():
    fine = config(simulate__token_grain=10, producer__session_token_limit=105, producer__train_token_limit=0)
    rough = coarse(fine)
    assert (rough.rollout.max_new_tokens, rough.engine.context, rough.learner.row_tokens) == (52, 205, 205)
    assert (rough.producer.session_token_limit, rough.producer.train_token_limit) == (11, 0)
    speed, before = rough.simulate.engines, fine.simulate.engines
    assert speed.step_seconds == pytest.approx(10 * before.step_seconds)
    assert speed.prefill_tokens_per_s == pytest.approx(before.prefill_tokens_per_s / 10)
    assert coarse(dataclasses.replace(fine, simulate=dataclasses.replace(fine.simulate, token_grain=1))) is not None


def test_too_few_updates_are_refused():
    with pytest.raises(ConfigError, match=r"config\.learner\.updates = 3: the first 3"):
        simulate(config(learner__updates=3))
