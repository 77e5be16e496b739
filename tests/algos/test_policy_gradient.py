import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algos.policy_gradient import policy_loss, sequence_keep, surrogate
from rlx.config.objective import Loss
from tests.oracle_adapter import base_objective

TOKENS = 8
SEQUENCES = jnp.repeat(jnp.arange(2), 4)
EVERY = jnp.ones(TOKENS, bool)


def draw(seed, gap=0.5):
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=TOKENS) - 0.1
    sampler, old = (jnp.asarray(logprobs + gap * rng.normal(size=TOKENS), jnp.float32) for _ in range(2))
    return jnp.asarray(logprobs, jnp.float32), sampler, old, jnp.asarray(rng.normal(size=TOKENS), jnp.float32)


def gradient(config, logprobs, sampler, old, advantages):
    def total(x):
        return policy_loss(surrogate(config), x, sampler, old, advantages, EVERY, SEQUENCES).loss.sum()

    return jax.grad(total)(logprobs)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_tis_ppo_from_its_own_forward_is_tis_is_cispo_from_the_sampler(seed):
    logprobs, sampler, _, advantages = draw(seed)
    tis = gradient(base_objective(loss="tis", tis_cap=1.3), logprobs, sampler, sampler, advantages)
    ppo_tis = base_objective(loss="ppo_clip_tis", tis_cap=1.3)
    np.testing.assert_allclose(gradient(ppo_tis, logprobs, sampler, logprobs, advantages), tis, rtol=1e-5)
    cispo = base_objective(loss="cispo", cispo_low=0.0, cispo_high=1.3)
    np.testing.assert_allclose(gradient(cispo, logprobs, sampler, sampler, advantages), tis, rtol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_clipped_losses_are_their_textbook_form(seed):
    logprobs, sampler, old, a = draw(seed)
    ratio = np.exp(logprobs - old)
    clipped = np.minimum(a * ratio, a * np.clip(ratio, 0.8, 1.28))
    dual = np.where(a < 0, np.maximum(clipped, 1.5 * a), clipped)
    for name, expected in (("ppo_clip", clipped), ("ppo_dual_clip", dual)):
        config = base_objective(loss=name, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
        got = policy_loss(surrogate(config), logprobs, sampler, old, a, EVERY, SEQUENCES)
        np.testing.assert_allclose(got.loss, -expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "ppo_clip_tis", "dppo_tv"])
def test_a_ratio_form_has_no_gradient_where_it_is_bounded(name):
    config = base_objective(loss=name, clip_low=0.01, clip_high=0.01, dual_clip=1.02, tv_delta=0.01)
    arguments = draw(3)
    changed = policy_loss(surrogate(config), *arguments, EVERY, SEQUENCES).bounded
    got = gradient(config, *arguments)
    assert changed.any()
    assert (~changed).any()
    np.testing.assert_array_equal(got[changed], 0)
    assert (got[~changed] != 0).all()


@pytest.mark.parametrize("level", ["geometric", "sum"])
@pytest.mark.parametrize("loss", ["tis", "icepop"])
def test_sequence_weights_are_the_same_for_all_tokens_of_a_sequence(loss, level):
    logprobs, sampler, old, a = draw(4, gap=0.1)
    bounds = {"tis_cap": math.inf, "mask_low": 0.0, "mask_high": math.inf}
    config = base_objective(loss=loss, importance_level=level, **bounds)
    got = policy_loss(surrogate(config), logprobs, sampler, old, a, EVERY, SEQUENCES).weight
    reduce = np.mean if level == "geometric" else np.sum
    expected = [math.exp(reduce((logprobs - sampler)[at])) for at in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(got, np.repeat(expected, 4), rtol=1e-5)


@pytest.mark.parametrize("level", ["geometric", "sum"])
def test_the_sequence_mask_keeps_or_drops_a_whole_sequence(level):
    log_ratios = jnp.asarray([0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 9.0])
    mask = jnp.asarray([True] * 7 + [False])
    config = base_objective(sequence_mask=level, sequence_mask_low=0.5, sequence_mask_high=1.55)
    kept = sequence_keep(config, log_ratios, mask, SEQUENCES)
    np.testing.assert_array_equal(kept, np.repeat([True, False], 4))
    loose = base_objective(sequence_mask=level, sequence_mask_low=0.5, sequence_mask_high=1.7)
    kept = sequence_keep(loose, log_ratios, mask, SEQUENCES)
    np.testing.assert_array_equal(kept, np.repeat([True, level == "geometric"], 4))


@pytest.mark.parametrize("name", typing.get_args(Loss))
def test_wild_ratios_stay_finite(name):
    logprobs = jnp.asarray([-200.0, -1e-6, -90.0, -0.1] * 2)
    sampler = jnp.asarray([-1e-6, -200.0, -0.1, -90.0] * 2)
    for sign in (1.0, -1.0):
        advantages = jnp.full(TOKENS, sign)
        config = base_objective(loss=name)
        loss = policy_loss(surrogate(config), logprobs, sampler, sampler, advantages, EVERY, SEQUENCES).loss
        assert jnp.isfinite(loss).all()
        assert jnp.isfinite(gradient(config, logprobs, sampler, sampler, advantages)).all()
