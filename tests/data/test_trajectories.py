"""Graded groups to trajectories: which samples are trained on, and what goes with each token."""

import dataclasses

import numpy as np
import pytest

from rlx.data.trajectories import advantage_inputs, by_sample, token_ages, trajectories
from rlx.rollout.fates import Rules, fate, graded, ungraded
from rlx.types import Group, StopReason
from tests.records import make_group, make_sample


def group_of(*samples):
    return Group(samples[0].task, samples)


def bins(group, filter_no_signal=True, mask_truncated=False):
    rules = Rules(1, 0, filter_no_signal, mask_truncated, train_token_limit=1 << 30, cut_long=False, return_stale=False)
    end = fate(group, rules)
    trained = {"buffered": end.trained} if end.trained else {}
    return {name: [s.index for s in samples] for name, samples in {**trained, **end.dropped, **ungraded(group)}.items()}


# --------------------------------------------------------------------------------------------------------------- fates


def test_a_group_with_signal_is_trained_on():
    assert bins(make_group([1, 0, 1])) == {"buffered": [0, 1, 2]}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equal_rewards_says_nothing(reward):
    assert bins(make_group([reward] * 3)) == {"no_signal": [0, 1, 2]}
    assert bins(make_group([reward] * 3), filter_no_signal=False) == {"buffered": [0, 1, 2]}


def test_truncated_samples_may_be_masked():
    """They still count in the group's signal, so that whether a group is used does not depend on it."""
    cut = make_sample(index=1, reward=0, stop=StopReason.LENGTH)
    group = group_of(make_sample(index=0, reward=1), cut, make_sample(index=2, reward=1))
    assert bins(group) == {"buffered": [0, 1, 2]}
    assert bins(group, mask_truncated=True) == {"buffered": [0, 2], "masked": [1]}


def test_failed_gradings_go_to_bins_of_their_own():
    """Their reward of 0 is no verdict: without them the group has no signal."""
    failed = [make_sample(index=i, outcome=o) for i, o in [(1, "timeout"), (3, "error"), (4, "timeout")]]
    group = group_of(make_sample(index=0, reward=1), *failed, make_sample(index=2, reward=1))
    wanted = {"no_signal": [0, 2], "failed/grader_timeout": [1, 4], "failed/grader_error": [3]}
    assert bins(group) == wanted
    assert [s.index for s in graded(group).samples] == [0, 2]
    assert bins(group_of(*failed)) == {"failed/grader_timeout": [1, 4], "failed/grader_error": [3]}


def test_every_sample_goes_somewhere_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        samples = [
            make_sample(
                index=i,
                reward=float(rng.integers(2)),
                stop=rng.choice([StopReason.STOP, StopReason.LENGTH]),
                outcome=rng.choice(["graded", "graded", "error"]),
            )
            for i in range(4)
        ]
        found = bins(group_of(*samples), bool(rng.integers(2)), bool(rng.integers(2)))
        assert sorted(i for indices in found.values() for i in indices) == [0, 1, 2, 3]
        assert all(found.values())


# ---------------------------------------------------------------------------------------------------------- advantages


def test_advantage_inputs_are_padded_to_one_shape():
    groups = [make_group([1, 0], group=7), make_group([0.5], group=3)]
    inputs = advantage_inputs(groups, capacity=5)
    np.testing.assert_array_equal(inputs["rewards"], np.array([1, 0, 0.5, 0, 0], np.float32))
    np.testing.assert_array_equal(inputs["groups"], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(inputs["valid"], [True, True, True, False, False])
    assert [x.dtype for x in inputs.values()] == [np.float32, np.int32, bool]


def test_values_find_their_samples_again():
    """In the order of the inputs, past samples that were not graded."""
    first = group_of(make_sample(7, 0), make_sample(7, 1, outcome="error"), make_sample(7, 2))
    values = by_sample([first, make_group([1, 1], group=3)], np.array([0.5, -0.5, 0.25, -0.25, 0, 0]))
    assert values == {(7, 0): 0.5, (7, 2): -0.5, (3, 0): 0.25, (3, 1): -0.25}
    inputs = advantage_inputs([first], capacity=3)
    assert inputs["valid"].sum() == 2


# -------------------------------------------------------------------------------------------------------- trajectories


def test_ages_are_of_each_token():
    sample = make_sample(prompt=2, written=5, spans=[(3, 2, 4), (5, 4, 7)])
    np.testing.assert_array_equal(token_ages(sample, version=6), [0, 0, 3, 3, 1, 1, 1])
    assert token_ages(sample, version=6).dtype == np.int32


@pytest.mark.parametrize("with_head", [False, True])
def test_trajectories_carry_what_the_packer_needs(with_head):
    samples = [make_sample(group=2, index=i, prompt=i + 1, written=3, head_size=2) for i in range(2)]
    found = trajectories(samples, {(2, 0): 0.5, (2, 1): -1.5}, version=4, with_head=with_head)
    assert [t.advantage for t in found] == [0.5, -1.5]
    for sample, t in zip(samples, found, strict=True):
        assert t.tokens is sample.tokens
        assert t.mask is sample.mask
        assert t.logprobs is sample.logprobs
        np.testing.assert_array_equal(t.ages, np.where(sample.mask, 4, 0))
        assert t.head is (sample.head if with_head else None)


def test_a_sample_without_an_advantage_is_an_error():
    sample = make_sample(group=2)
    with pytest.raises(KeyError):
        trajectories([dataclasses.replace(sample, index=9)], {(2, 0): 0.5}, version=0, with_head=False)
