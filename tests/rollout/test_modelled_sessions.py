"""Modelled sessions have the turns, times, rewards and failures that their distributions say."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.config.simulation import DistributionConfig, SimulatedFaults
from rlx.rollout import virtual
from rlx.rollout.draws import POINTS, Draw
from rlx.rollout.modelled_sessions import Work
from rlx.rollout.transcript import Transcript
from rlx.types import Task
from tests.rollout.test_modelled import SESSIONS, work

# ------------------------------------------------------------------------------------------------------------ sessions


def task(number: int) -> Task:
    return Task(f"task/{number}", "task", "", None, "modelled", {"number": number})


def play(of: Work, number: int = 0) -> tuple[list[int], float, float, str]:
    """Lengths of the observations, seconds, reward and outcome of a session."""

    async def main():
        environment = of.environment(task(number))
        observations = [await environment.reset()]
        while (said := await environment.step(np.array([1]))) is not None:
            observations.append(said)
        verdict = await environment.grade(Transcript())
        now = asyncio.get_running_loop().time()
        return [len(o) for o in observations], now, verdict.grade.reward, str(verdict.grade.outcome)

    return virtual.run(main())


def test_a_session_has_its_turns_and_takes_its_time():
    lengths, seconds, _, outcome = play(work())
    assert lengths == [10, 5, 5]
    assert seconds == 3.0 + 2 * 2.0 + 0.5 + 1.0
    assert outcome == "graded"


def test_the_sessions_of_a_task_differ_and_repeat():
    varied = dataclasses.replace(SESSIONS, prompt_tokens=DistributionConfig("lognormal", 500.0, 1.0, ()))
    first, again = work(varied), work(varied)
    drawn = [play(first)[0] for _ in range(5)]
    assert len({tuple(lengths) for lengths in drawn}) == 5
    assert [play(again)[0] for _ in range(5)] == drawn
    assert [play(work(varied, seed=1))[0] for _ in range(5)] != drawn


def test_rewards_follow_the_pass_rates_of_the_tasks():
    of = work(dataclasses.replace(SESSIONS, pass_rate=DistributionConfig("quantiles", 0.0, 0.0, (0.0, 1.0))))
    assert sorted(of.pass_rates) == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=1e-3)
    passed = [np.mean([play(of, number)[2] for _ in range(150)]) for number in range(4)]
    assert passed == pytest.approx(of.pass_rates, abs=0.12)


def test_gradings_fail_at_their_rate():
    of = work(faults=SimulatedFaults(0.0, 0.0, 0.25))
    outcomes = [play(of)[3] for _ in range(200)]
    assert outcomes.count("error") / 200 == pytest.approx(0.25, abs=0.09)


def test_a_grain_makes_lengths_shorter():
    assert [
        len(x) for x in (virtual.run(Work(SESSIONS, SimulatedFaults(0, 0, 0), 0, 5).environment(task(0)).reset()),)
    ] == [2]


# --------------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize(
    "config, mean, deviation",
    [
        (DistributionConfig("constant", 3.0, 0.0, ()), 3.0, 0.0),
        (DistributionConfig("lognormal", 500.0, 0.8, ()), 500.0, 400.0),
        (DistributionConfig("gamma", 70.0, 0.5, ()), 70.0, 35.0),
        (DistributionConfig("gamma", 2.0, 1.0, ()), 2.0, 2.0),
        (DistributionConfig("beta", 0.4, 0.5, ()), 0.4, 0.2),
        (DistributionConfig("beta", 0.0, 0.0, ()), 0.0, 0.0),
        (DistributionConfig("quantiles", 0.0, 0.0, (0.0, 1.0)), 0.5, 1 / np.sqrt(12)),
        (DistributionConfig("lognormal", 0.0, 0.8, ()), 0.0, 0.0),
    ],
)
def test_distributions_have_the_mean_and_deviation_that_they_are_given(config, mean, deviation):
    draw = Draw(config)
    values = np.array([draw.of_seed(int(seed)) for seed in np.random.default_rng(0).integers(0, 2**32, 200_000)])
    assert draw.mean == pytest.approx(mean, rel=1e-3)
    assert values.mean() == pytest.approx(mean, rel=1e-2)
    assert values.std() == pytest.approx(deviation, rel=3e-2)
    assert (values >= 0).all()


def test_draws_are_ascending_and_scaled():
    config = DistributionConfig("gamma", 70.0, 0.5, ())
    draw, half = Draw(config), Draw(config, 0.5)
    assert draw.table == sorted(draw.table)
    assert [draw.at(p) for p in (0.0, 0.5, 1 - 1e-12)] == [draw.table[i] for i in (0, POINTS // 2, POINTS - 1)]
    assert (draw.of_seed(0), draw.of_seed(2**32 - 1)) == (draw.table[0], draw.table[-1])
    np.testing.assert_allclose(np.array(half.table) * 2, draw.table)
