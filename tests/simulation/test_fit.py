"""Records of one run predict another: on runs whose parameters are known, and on engines that are not modelled ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from rlx.config.errors import ConfigError
from rlx.config.parse import dump
from rlx.metrics.ledger import Ledger
from rlx.rollout import virtual
from rlx.rollout.buffer import Buffer
from rlx.rollout.fates import ages
from rlx.rollout.fleet import Fleet
from rlx.rollout.options import fleet_options, producer_options, rules
from rlx.rollout.producer import Producer
from rlx.rollout.timing import TimedReplica, now, timed_environments
from rlx.simulation import fit
from rlx.simulation.fit import components, fit_update, pass_rates, split_by_task
from rlx.simulation.fit_engines import _solve
from rlx.simulation.run import sampling, simulate
from rlx.sync.publisher import Publisher
from tests.rollout.scripted import Conversation, ScriptedEngine, tasks
from tests.simulation.small import config, hidden

OTHERS = (
    {"producer__sessions_in_flight": 32, "producer__max_policy_lag": 6},
    {"producer__sessions_in_flight": 8, "producer__max_policy_lag": 1},
)


@pytest.fixture(scope="module")
def recorded():
    records: list[dict] = []
    simulate(hidden(learner__updates=60), records.append)
    return records


def test_hidden_parameters_are_found(recorded):
    truth = hidden().simulate
    found = fit.fit(recorded, hidden(), config().simulate)
    assert found.engines.count == 1
    assert found.engines.load_seconds == pytest.approx(0.4)
    assert found.trainer.update_seconds == pytest.approx(1.0, rel=0.01)
    assert found.trainer.seconds_per_token == pytest.approx(0.0015, rel=0.01)
    assert found.trainer.publish_seconds == pytest.approx(0.2)
    assert found.trainer.other_seconds == pytest.approx(0.1)
    assert found.trainer.engine_slowdown == pytest.approx(1.6, rel=0.1)
    assert found.engines.prefill_tokens_per_s == pytest.approx(2500, rel=0.25)
    for running in (8, 16):  # the step itself: its two parts are hard to tell apart
        step, true_step = (
            e.step_seconds + running * e.step_seconds_per_request for e in (found.engines, truth.engines)
        )
        assert step == pytest.approx(true_step, rel=0.12)
    assert found.sessions.task_cv == pytest.approx(0.3, abs=0.1)
    assert found.sessions.pass_rate.mean == pytest.approx(0.35, abs=0.05)
    assert found.sessions.pass_rate.cv == pytest.approx(0.8, rel=0.25)
    for name in ("prompt_tokens", "turns", "response_tokens", "tool_tokens", "tool_seconds", "grade_seconds"):
        assert getattr(found.sessions, name).mean == pytest.approx(getattr(truth.sessions, name).mean, rel=0.1), name


def test_what_engines_cost_the_trainer_is_found():
    """On one device both lose: the trainer while engines run, engines while it trains. Here the lag stops engines."""
    shared = {"simulate__trainer__update_seconds": 8.0, "producer__max_policy_lag": 1, "learner__updates": 40}
    records: list[dict] = []
    truth = simulate(hidden(simulate__trainer__own_slowdown=1.5, **shared), records.append)
    alone = simulate(hidden(**shared))
    assert 1.2 * alone.train_minutes < truth.train_minutes < 1.5 * alone.train_minutes
    found = fit.fit(records, hidden(**shared), config().simulate).trainer
    assert (found.own_slowdown, found.engine_slowdown) == pytest.approx((1.5, 1.6), rel=0.05)
    assert (found.update_seconds, found.seconds_per_token) == pytest.approx((8.0, 0.0015), rel=0.01)


def test_where_engines_always_run_nothing_tells_what_they_cost_the_trainer():
    tokens = np.linspace(100.0, 200.0, 40)
    seconds = 1.0 + 0.01 * tokens
    assert fit_update(tokens, seconds, seconds) == pytest.approx((1.0, 0.01, 1.0))


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_another_run_is_predicted(recorded, changes):
    found = fit.fit(recorded, hidden(), config().simulate)
    truth = simulate(hidden(run__seed=7, learner__updates=60, **changes))
    guess = simulate(dataclasses.replace(config(learner__updates=60, **changes), simulate=found))
    for name in ("update_minutes", "trainer_wait_share", "age_mean", "engine_occupancy", "session_minutes"):
        assert getattr(guess, name) == pytest.approx(getattr(truth, name), rel=0.2), name


# ------------------------------------------------------------------- an engine with laws of its own, in no way modelled


def scripted(sessions: int, lag: int, updates: int = 40, trace=lambda record: None) -> tuple[float, float, float]:
    """(update seconds, wait share, mean age) of scripted engines and conversations, after the first updates."""
    settings = config(
        producer__sessions_in_flight=sessions, producer__max_policy_lag=lag, engine__slots=8, rollout__max_new_tokens=64
    )

    async def main():
        ledger, times, consumed = Ledger(), [], []
        engines = [ScriptedEngine(f"e{i}", admission=8, token_s=0.02, lengths=(5, 60), load_s=0.1) for i in range(2)]
        fleet = Fleet([TimedReplica(e, trace) for e in engines], fleet_options(settings), None, 0, ledger)
        buffer = Buffer(rules(settings, lag), ledger)
        environments = timed_environments(lambda task: Conversation(task, turns=3, seconds=0.4), trace)
        options = producer_options(settings, fleet.slots)
        producer = Producer(fleet, environments, tasks(), buffer, ledger, sampling(settings), options)
        publisher = Publisher(fleet, "refresh")
        async with fleet, producer:
            for version in range(updates):
                began = now()
                batch = await buffer.take(version)
                taken = now()
                tokens = sum(len(s.tokens) for s in batch.samples)
                await asyncio.sleep(0.2 + tokens * 4e-4)
                buffer.done(batch, applied=True)
                trained = now()
                await publisher.publish(None, version + 1)
                times.append((began, taken, now()))
                consumed.append(ages(batch.samples, batch.version))
                record = {"began": began, "taken": taken, "trained": trained, "published": now(), "ended": now()}
                trace({"kind": "update", "tokens": tokens, **record})
        return times[3:], consumed[3:]

    times, consumed = virtual.run(main())
    span = times[-1][2] - times[0][0]
    tokens = sum(by_age.total() for by_age in consumed)
    age = sum(a * n for by_age in consumed for a, n in by_age.items()) / tokens
    return span / len(times), sum(taken - began for began, taken, _ in times) / span, age


def test_a_run_of_scripted_engines_predicts_another_one():
    records: list[dict] = []
    scripted(12, 2, trace=records.append)
    own = {"engine__slots": 8, "rollout__max_new_tokens": 64}
    found = fit.fit(records, config(**own), config().simulate)
    assert found.engines.count == 2
    for sessions, lag in ((24, 4), (6, 1)):
        changes = {"producer__sessions_in_flight": sessions, "producer__max_policy_lag": lag, "learner__updates": 40}
        guess = simulate(dataclasses.replace(config(**own, **changes), simulate=found))
        truth = scripted(sessions, lag)
        predicted = (guess.update_minutes * 60, guess.trainer_wait_share, guess.age_mean)
        # Ages are whole updates, so their mean over forty of them is known to about a tenth of one.
        assert predicted == pytest.approx(truth, rel=0.2, abs=0.1), (sessions, lag)


def test_where_always_as_many_ran_the_step_is_taken_to_be_constant():
    rng = np.random.default_rng(3)
    tokens, prompts = rng.integers(10, 100, 200).astype(float), np.zeros(200)
    rows = np.stack([tokens, 4.0 * tokens, np.ones(200), prompts, 0.01 * tokens, np.zeros(200)], 1)
    step, per_request, held, _ = _solve(rows)[0]
    assert (step, per_request, held) == pytest.approx((0.01, 0.0, 0.0), abs=1e-9)


def test_of_responses_that_are_all_alike_nothing_is_put_down_to_the_request():
    running = np.linspace(1.0, 8.0, 200)
    tokens = np.full(200, 32.0)
    seconds = tokens * (0.01 + 0.002 * running)
    rows = np.stack([tokens, tokens * running, np.ones(200), np.zeros(200), seconds, np.zeros(200)], 1)
    step, per_request, held, _ = _solve(rows)[0]
    assert (step, per_request, held) == pytest.approx((0.01, 0.002, 0.0), abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- statistics


def test_variance_components_of_known_ones():
    rng = np.random.default_rng(0)
    groups = [rng.normal(m, 2.0, size=rng.integers(3, 20)) for m in rng.normal(5.0, 1.5, size=2000)]
    between, within = components(groups)
    assert between == pytest.approx(1.5**2, rel=0.1)
    assert within == pytest.approx(4.0, rel=0.05)


def test_groups_of_one_say_nothing_of_what_is_between_them():
    assert components([[1.0], [2.0]]) == (0.0, 0.0)
    assert components([[1.0, 2.0]]) == (0.0, 0.0)


@pytest.mark.parametrize("rate, cv", [(0.4, 0.7), (0.8, 0.2)])
def test_pass_rates_are_told_from_the_noise_of_their_attempts(rate, cv):
    rng = np.random.default_rng(1)
    variance = (rate * cv) ** 2
    strength = rate * (1 - rate) / variance - 1
    rates = rng.beta(rate * strength, (1 - rate) * strength, size=1000)
    found = pass_rates([(rng.random(8) < p).tolist() for p in rates])
    assert (found.kind, found.mean) == ("beta", pytest.approx(rate, abs=0.03))
    assert found.cv == pytest.approx(cv, rel=0.12)


def test_tasks_that_all_pass_alike_have_one_rate():
    assert pass_rates([[True] * 4, [True] * 4]).kind == "constant"
    assert pass_rates([[True, False]] * 10).mean == 0.5


def test_lengths_are_freed_of_what_a_task_shares():
    rng = np.random.default_rng(2)
    factors = np.exp(rng.normal(0.0, 0.5, size=400))
    lengths = [100 * f * np.exp(rng.normal(0.0, 0.3, size=8)) for f in factors]
    cv, bare = split_by_task(lengths)
    assert cv == pytest.approx(np.sqrt(np.expm1(0.25)), rel=0.1)
    assert np.std(np.log(bare)) == pytest.approx(0.3, rel=0.1)


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_run_directory_is_read(tmp_path, recorded):
    (tmp_path / "config.json").write_text(dump(hidden()))
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in recorded))
    found = fit.from_run(tmp_path, config())
    assert found == fit.fit(recorded, hidden(), config().simulate)
    lines = fit.describe(found)
    assert any(line.split() == ["simulate.engines.count", "1"] for line in lines)
    assert any("tool_seconds" in line and "quantiles, mean 1." in line for line in lines)


def test_a_directory_without_records_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no timing\.jsonl"):
        fit.from_run(tmp_path, config())


def test_too_few_records_are_refused(recorded):
    with pytest.raises(ConfigError, match="at least 20 and 2 are needed"):
        fit.fit(recorded[:50], hidden(), config().simulate)
