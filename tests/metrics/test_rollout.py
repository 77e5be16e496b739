"""Metrics of a collection, by hand."""

import numpy as np
import pytest

from rlx.metrics.rollout import grading_outcomes, grading_scalars, repetition, rollout_scalars
from rlx.types import Group, StopReason
from tests.records import make_group, make_sample, make_task


@pytest.fixture
def groups():
    mixed = Group(
        make_task(0),
        (
            make_sample(0, 0, prompt=3, written=4, reward=1.0, seconds=0.5),
            make_sample(0, 1, prompt=3, written=8, reward=0.25, stop=StopReason.LENGTH, outcome="timeout", seconds=2),
        ),
    )
    return [mixed, make_group([0, 0], group=1, prompt=5, written=1), make_group([1, 1], group=2, source="words")]


@pytest.mark.parametrize(
    "written, share", [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 0), ([7] * 6, 2 / 3), ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5)]
)
def test_repetition_is_the_share_of_4_grams_that_came_before(written, share):
    assert repetition(np.array(written, np.int32)) == pytest.approx(share)


def test_rewards(groups):
    """The sample whose grading timed out has no reward, so its group is one sample without signal."""
    found = rollout_scalars(groups)
    rewards = [1, 0, 0, 1, 1]
    assert found["reward/mean"] == pytest.approx(np.mean(rewards))
    assert found["reward/std"] == pytest.approx(np.std(rewards))
    assert found["reward/pass_rate"] == pytest.approx(3 / 5)
    assert found["reward/no_signal_fraction"] == 1
    assert found["reward/all_zero_fraction"] == pytest.approx(1 / 3)
    assert found["reward/all_one_fraction"] == pytest.approx(2 / 3)
    assert found["reward/pass_rate_sums"] == pytest.approx(1 / 3)
    assert found["reward/pass_rate_words"] == 1


def test_without_any_verdict_there_are_no_rewards():
    found = rollout_scalars([make_group([1, 0], outcome="error")])
    assert not any(name.startswith("reward/") for name in found)
    assert found["response/length_mean"] == 4


def test_responses(groups):
    found = rollout_scalars(groups)
    lengths = [4, 8, 1, 1, 4, 4]
    assert found["response/length_mean"] == pytest.approx(np.mean(lengths))
    assert found["response/length_std"] == pytest.approx(np.std(lengths))
    assert found["response/length_max"] == 8
    assert found["response/prompt_length_mean"] == pytest.approx((3 + 3 + 5 + 5 + 3 + 3) / 6)
    assert found["response/truncated_fraction"] == found["response/stop_reason_length"] == pytest.approx(1 / 6)
    assert found["response/stop_reason_stop"] == pytest.approx(5 / 6)
    assert found["response/stop_reason_abort"] == 0
    assert all(type(value) is float for value in found.values())


def test_a_group_of_equal_middle_rewards_is_neither_all_zero_nor_all_one():
    found = rollout_scalars([make_group([0.5, 0.5])])
    assert found["reward/no_signal_fraction"] == 1
    assert found["reward/all_zero_fraction"] == found["reward/all_one_fraction"] == found["reward/pass_rate"] == 0


def test_grading(groups):
    assert grading_scalars(groups) == {"grader/seconds_mean": pytest.approx(3.5 / 6), "grader/seconds_max": 2}
    assert grading_outcomes(groups) == {"graded": 5, "timeout": 1}
