"""Score centering on one position of a small vocabulary, where expectations under the sampler are sums."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algos.centering import center, centering_loss, norms
from rlx.algos.objective import Targets, objective
from rlx.algos.policy_gradient import bounded, surrogate
from tests.oracle_adapter import CENTRED, base_objective, dense_stats

VOCABULARY = 9
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed):
    """(trainer's logits, sampler's log-probs), far enough apart for bounds to act."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=VOCABULARY)
    return jnp.asarray(logits), jax.nn.log_softmax(jnp.asarray(logits + 0.8 * rng.normal(size=VOCABULARY)))


def targets_of(sampler, advantages, k):
    """Every token of the vocabulary once, as if each had been sampled."""
    head = jnp.argsort(-sampler)[:k].astype(jnp.int32)
    return Targets(
        mask=jnp.ones(VOCABULARY, bool),
        tokens=jnp.arange(VOCABULARY, dtype=jnp.int32),
        sequences=jnp.arange(1, VOCABULARY + 1),
        lengths=jnp.ones(VOCABULARY, int),
        advantages=advantages,
        sampler_logprobs=sampler,
        ages=jnp.zeros(VOCABULARY, jnp.int32),
        weights=jnp.exp(sampler),  # so that the sum over tokens is the expectation under the sampler
        head_ids=jnp.tile(head, (VOCABULARY, 1)),
        head_logprobs=jnp.tile(sampler[head], (VOCABULARY, 1)),
    )


@partial(jax.jit, static_argnums=(0, 4))
def expected_gradient(config, logits, sampler, advantages, k):
    targets = targets_of(sampler, advantages, k)

    def total(logits):
        return objective(config, dense_stats(jnp.tile(logits, (VOCABULARY, 1)), targets), targets)[0]

    return jax.grad(total)(logits)


def config_of(weight, **changes):
    bounds = {"tis_cap": 1.1, "mask_low": 0.7, "mask_high": 1.4}
    return base_objective(loss=CENTRED[weight], centering=weight, **{**bounds, **changes})


@pytest.mark.parametrize("weight", CENTRED)
@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_a_constant_advantage_has_no_expected_gradient(weight, seed):
    logits, sampler = draw(seed)
    ones = jnp.ones(VOCABULARY)
    np.testing.assert_allclose(expected_gradient(config_of(weight), logits, sampler, ones, VOCABULARY), 0, atol=1e-12)


@pytest.mark.parametrize("weight", CENTRED)
def test_without_centering_a_constant_advantage_drifts(weight):
    uncentred = dataclasses.replace(config_of(weight), centering="off")
    gradient = expected_gradient(uncentred, *draw(0), jnp.ones(VOCABULARY), VOCABULARY)
    assert jnp.abs(gradient).max() > 0.01


@pytest.mark.parametrize("k", [3, VOCABULARY])
@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_nothing_is_subtracted_where_f_is_the_ratio_itself(k, seed):
    logits, sampler = draw(seed)
    advantages = jnp.asarray(np.random.default_rng(seed).normal(size=VOCABULARY))
    centred = config_of("tis", tis_cap=math.inf)
    uncentred = base_objective(loss="tis", tis_cap=math.inf)
    got, expected = (expected_gradient(c, logits, sampler, advantages, k) for c in (centred, uncentred))
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("weight", CENTRED)
@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_a_head_is_exact_where_the_tails_are_proportional(weight, seed):
    logits, sampler = draw(seed)
    tail = jnp.argsort(-sampler)[4:]
    own = jax.nn.log_softmax(logits)
    sampler = sampler.at[tail].set(own[tail] + jax.nn.logsumexp(sampler[tail]) - jax.nn.logsumexp(own[tail]))
    likeliest = jnp.argsort(-sampler)  # the tail's order changed; K = 4 only where it did not rise above the head
    advantages = jnp.asarray(np.random.default_rng(seed).normal(size=VOCABULARY))
    k = int(max(np.flatnonzero(np.isin(likeliest, tail, invert=True))) + 1)
    got, exact = (expected_gradient(config_of(weight), logits, sampler, advantages, size) for size in (k, VOCABULARY))
    np.testing.assert_allclose(got, exact, atol=1e-12)


@pytest.mark.parametrize("weight", CENTRED)
@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_norms_and_metrics_are_those_of_the_dense_gradient(weight, k):
    """Every sampled token's logit gradient, token by token, against the norms that need only the head."""
    logits, sampler = draw(11)
    targets = targets_of(sampler, jnp.ones(VOCABULARY), k)
    rule = surrogate(config_of(weight))
    stats = dense_stats(jnp.tile(logits, (VOCABULARY, 1)), targets)
    head = center(lambda ratio: bounded(rule, ratio, ratio), stats.candidate_logprobs, targets.head_logprobs)
    own = jnp.exp(stats.logprob - sampler)
    f = bounded(rule, own, own)[0]
    drift, covariance = norms(head, stats.candidate_logprobs, targets.head_ids, f, stats.logprob, targets.tokens)

    def centring(logits):
        stats = dense_stats(jnp.tile(logits, (VOCABULARY, 1)), targets)
        return centering_loss(head, stats.candidate_logprobs, jnp.ones(VOCABULARY))[0]

    mean = jax.grad(centring)(logits)  # the drift: minus the loss's gradient of minus the mean score
    np.testing.assert_allclose(drift, jnp.abs(mean).sum(), rtol=1e-10)
    scores = jnp.eye(VOCABULARY) - jax.nn.softmax(logits)
    np.testing.assert_allclose(covariance, jnp.abs(f[:, None] * scores - mean).sum(-1), rtol=1e-10)


def test_the_divergence_of_a_full_head_is_the_kl():
    logits, sampler = draw(2)
    candidates = jax.nn.log_softmax(logits)[None]
    head = center(lambda ratio: (ratio, ratio > 9), candidates, sampler[None])
    np.testing.assert_allclose(head.kl[0], jnp.sum(jnp.exp(sampler) * (sampler - candidates[0])), rtol=1e-9)
    np.testing.assert_allclose(head.sampler_mass, 1, rtol=1e-12)


def test_a_head_with_an_impossible_token_is_finite():
    logits, sampler = draw(3)
    candidates = jax.nn.log_softmax(logits)[None]
    for weight in CENTRED:
        rule = surrogate(config_of(weight))
        head = center(lambda r, rule=rule: bounded(rule, r, r), candidates, sampler[None].at[0, 0].set(-jnp.inf))
        assert all(jnp.isfinite(x).all() for x in head)
