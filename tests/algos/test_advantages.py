import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algos import advantages as adv
from tests.oracle_adapter import base_objective

SAMPLES = 12
PER_SAMPLE = ("group_mean", "group_std", "leave_one_out", "batch_whitened", "mean_normalised", "none")
rewards_drawn = st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=SAMPLES, max_size=SAMPLES)
groups_drawn = st.lists(st.integers(-3, 99), min_size=SAMPLES, max_size=SAMPLES)
valid_drawn = st.lists(st.booleans(), min_size=SAMPLES, max_size=SAMPLES)


def by_hand(method, reward, rewards, others):
    """`rewards` of the sample's group, or of the batch for batch_whitened; `others` without its own."""
    mean = np.mean(rewards)
    std = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
    return {
        "group_mean": reward - mean,
        "group_std": (reward - mean) / (std + 1e-6),
        "leave_one_out": reward - np.mean(others) if others else 0.0,
        "batch_whitened": (reward - mean) / (std + 1e-6),
        "mean_normalised": (reward - mean) / mean if mean else 0.0,
        "none": reward,
    }[method]


@pytest.mark.parametrize("method", PER_SAMPLE)
@settings(max_examples=20, deadline=None)
@given(rewards=rewards_drawn, groups=groups_drawn, valid=valid_drawn)
def test_every_method_is_its_formula_sample_by_sample(method, rewards, groups, valid):
    config = base_objective(advantage=method)
    poisoned = jnp.where(jnp.asarray(valid), jnp.asarray(rewards, jnp.float32), jnp.nan)
    compute = jax.jit(adv.advantages, static_argnums=0)
    got = compute(config, poisoned, jnp.asarray(groups), jnp.asarray(valid))
    for i in range(SAMPLES):
        same = [j for j in range(SAMPLES) if valid[j] and (groups[j] == groups[i] or method == "batch_whitened")]
        others = [rewards[j] for j in same if j != i]
        expected = by_hand(method, rewards[i], [rewards[j] for j in same], others) if valid[i] else 0.0
        np.testing.assert_allclose(got[i], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_leave_one_out_is_group_mean_scaled(size):
    rewards = jnp.asarray(np.random.default_rng(size).normal(size=2 * size), jnp.float32)
    groups, valid = jnp.repeat(jnp.arange(2), size), jnp.ones(2 * size, bool)
    mean, others = adv.group_mean(rewards, groups, valid), adv.leave_one_out(rewards, groups, valid)
    np.testing.assert_allclose(others, mean * size / (size - 1), rtol=1e-5, atol=1e-6)


def gae_by_hand(rewards, values, discount, gae_lambda):
    steps = len(rewards)
    deltas = [rewards[t] + (discount * values[t + 1] if t + 1 < steps else 0.0) - values[t] for t in range(steps)]
    return [sum((discount * gae_lambda) ** k * deltas[t + k] for k in range(steps - t)) for t in range(steps)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_gae_passes_over_masked_tokens_and_never_into_another_episode(seed):
    rng = np.random.default_rng(seed)
    mask, ids = rng.random(10) < 0.7, np.repeat([4, 1, 7], [3, 5, 2])
    rewards, values = rng.normal(size=(2, 10)).astype(np.float32)
    poisoned = [jnp.where(jnp.asarray(mask), jnp.asarray(x), jnp.inf) for x in (rewards, values)]
    ids_seen = jnp.where(jnp.asarray(mask), jnp.asarray(ids), -5)
    got = jax.jit(adv.gae, static_argnums=(4, 5))(*poisoned, jnp.asarray(mask), ids_seen, 0.9, 0.8)
    expected = np.zeros(10)
    for episode in (4, 1, 7):
        at = np.flatnonzero(mask & (ids == episode))
        expected[at] = gae_by_hand(rewards[at], values[at], 0.9, 0.8)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def token_batch():
    rng = np.random.default_rng(1)
    return {
        "rewards": jnp.asarray([1.0, 0.0, 0.0, 1.0, jnp.nan]),
        "groups": jnp.asarray([3, 3, 8, 8, 8]),
        "valid": jnp.asarray([True, True, True, True, False]),
        "mask": jnp.asarray(rng.random(14) < 0.8),
        "samples": jnp.repeat(jnp.arange(5), jnp.asarray([4, 2, 3, 3, 2]), total_repeat_length=14),
    }


def test_token_advantages_give_a_sample_s_advantage_to_its_tokens():
    batch = token_batch()
    got = adv.token_advantages(base_objective(advantage="group_mean"), **batch)
    expected = jnp.asarray([0.5, -0.5, -0.5, 0.5, 0.0])[batch["samples"]]
    np.testing.assert_array_equal(got, jnp.where(batch["mask"], expected, 0))


def test_gae_with_the_group_s_mean_as_critic():
    batch = token_batch()
    whole = adv.token_advantages(base_objective(advantage="gae", discount=1.0, gae_lambda=1.0), **batch)
    np.testing.assert_allclose(whole, adv.token_advantages(base_objective(advantage="group_mean"), **batch), atol=1e-6)
    decayed = adv.token_advantages(base_objective(advantage="gae", discount=1.0, gae_lambda=0.5), **batch)
    first = np.flatnonzero(np.asarray(batch["mask"]) & (np.asarray(batch["samples"]) == 0))
    np.testing.assert_allclose(decayed[first], 0.5 * 0.5 ** np.arange(len(first))[::-1], rtol=1e-6)
    with pytest.raises(ValueError, match="token_advantages"):
        adv.advantages(base_objective(advantage="gae"), batch["rewards"], batch["groups"], batch["valid"])


def test_token_advantages_ignore_what_masked_tokens_say_of_their_sample():
    batch = token_batch()
    config = base_objective(advantage="gae", gae_lambda=0.7)
    expected = adv.token_advantages(config, **batch)
    samples = jnp.where(batch["mask"], batch["samples"], 4 - batch["samples"])
    np.testing.assert_allclose(adv.token_advantages(config, **{**batch, "samples": samples}), expected, atol=1e-7)


def test_no_signal_groups_tell_all_zero_from_all_one():
    rewards = jnp.asarray([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5, jnp.nan])
    groups = jnp.asarray([5, 5, 9, 9, 2, 2, 7, 5])
    got = adv.no_signal_groups(rewards, groups, jnp.asarray([True] * 7 + [False]))
    assert tuple(map(int, got)) == (3, 1, 1, 4)
    np.testing.assert_allclose(got.fraction, 0.75)


def test_the_configuration_is_static_and_hashable():
    config = base_objective(advantage="group_std", advantage_ddof=0)
    assert hash(config) == hash(dataclasses.replace(config))
