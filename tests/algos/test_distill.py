"""Distillation on a tabular policy, where every expectation is a sum over the vocabulary."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algos.distill import calibrated_lam, combine_signals, kept, top_k_overlap
from rlx.algos.objective import objective
from tests.every_token import every_token
from tests.oracle_adapter import base_objective, dense_stats

VOCABULARY, STATES, CANDIDATES = 6, 3, 2


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def draw(seed):
    """Log-probs of expert, proxy base and target base, [states, vocabulary] each."""
    rng = np.random.default_rng(seed)
    return (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(STATES, VOCABULARY)))) for _ in range(3))


def config_of(form, **distill):
    return base_objective(loss="reinforce", distill={"form": form, **distill})


def targets_of(config, logits, expert, base, reference):
    policy = jax.nn.log_softmax(logits)
    count = VOCABULARY if config.distill.form == "full" else CANDIDATES
    signal = expert if config.distill.signal == "teacher" else expert - base
    return every_token(policy, reference, signal, jnp.tile(jnp.arange(count), (STATES, 1)))


def loss_and_metrics(config, logits, targets):
    return objective(config, dense_stats(jnp.repeat(logits, VOCABULARY, 0), targets), targets)


@partial(jax.jit, static_argnums=0)
def expected_gradient(config, logits, expert, base, reference):
    targets = targets_of(config, logits, expert, base, reference)
    return jax.grad(loss_and_metrics, argnums=1, has_aux=True)(config, logits, targets)[0]


def converged(config, expert, base, reference):
    """The policy after gradient descent from the reference, with the natural step of a tabular softmax."""

    def step(_, logits):
        gradient = expected_gradient(config, logits, expert, base, reference)
        return logits - 0.5 * gradient / jax.nn.softmax(logits)

    return jax.nn.softmax(jax.lax.fori_loop(0, 200, step, reference))


@pytest.mark.parametrize("form", ["sampled", "top_k", "full"])
def test_proxy_opd_converges_to_the_reference_times_a_power_of_what_the_expert_learned(form):
    expert, base, reference = draw(0)
    config = config_of(form, alpha=1.2, lam=1.5)
    optimum = jax.nn.softmax(reference + 1.2 / 1.5 * (expert - base))
    np.testing.assert_allclose(converged(config, expert, base, reference), optimum, rtol=1e-6)


@pytest.mark.parametrize("form", ["sampled", "top_k", "full"])
def test_opd_converges_to_the_teacher(form):
    expert, base, reference = draw(1)
    config = config_of(form, signal="teacher", alpha=1.0, lam=1.0)
    np.testing.assert_allclose(converged(config, expert, base, reference), jnp.exp(expert), rtol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_all_forms_have_one_expected_gradient(seed):
    expert, base, reference = draw(seed)
    logits = jnp.asarray(np.random.default_rng(seed + 1).normal(size=(STATES, VOCABULARY)))
    gradients = [
        expected_gradient(config_of(form), logits, expert, base, reference) for form in ("sampled", "top_k", "full")
    ]
    np.testing.assert_allclose(gradients[0], gradients[2], atol=1e-12)
    np.testing.assert_allclose(gradients[1], gradients[2], atol=1e-12)


@pytest.mark.parametrize("form", ["sampled", "top_k", "full"])
def test_tokens_that_the_proxy_does_not_know_train_nothing(form):
    """Their log-probs under the proxy may be anything; with every token unknown there is no gradient at all."""
    expert, base, reference = draw(2)
    config = config_of(form)
    logits = reference + 0.1
    targets = targets_of(config, logits, expert, base, reference)
    unknown = dataclasses.replace(
        targets,
        signal=jnp.full_like(targets.signal, jnp.nan),
        head_signal=jnp.full_like(targets.head_signal, -jnp.inf),
        known=jnp.zeros_like(targets.mask),
        head_known=jnp.zeros(targets.head_ids.shape, bool),
    )

    gradient_of = jax.jit(jax.grad(loss_and_metrics, argnums=1, has_aux=True), static_argnums=0)
    gradient, metrics = gradient_of(config, logits, unknown)
    np.testing.assert_array_equal(gradient, 0)
    assert metrics.values()["distill/masked_vocabulary_fraction"] == 1
    assert jnp.abs(expected_gradient(config, logits, expert, base, reference)).max() > 1e-3


@pytest.mark.parametrize(
    "calibration, expected",
    [
        ("constant", [1.5, 1.5, 1.5]),
        ("entropy", 1.5 / np.array([0.25, 1 - np.exp(-0.5), 1 - np.exp(-2.0)])),
        ("overlap", 1.5 / np.array([0.25, 0.25, 1.0])),
    ],
)
def test_lambda_follows_entropy_or_overlap_down_to_the_floor(calibration, expected):
    config = config_of("sampled", calibration=calibration, calibration_floor=0.25, lam=1.5).distill
    np.testing.assert_allclose(
        calibrated_lam(config, jnp.asarray([0.0, 0.5, 2.0]), jnp.asarray([0.0, 0.2, 1.0])), expected
    )


@pytest.mark.parametrize(
    "name, expected",
    [("all", [1, 1, 1, 1, 1]), ("rewarded", [1, 1, 0, 0, 0]), ("agreeing", [1, 0, 0, 1, 1])],
)
def test_filters_keep_the_rewarded_or_the_agreeing(name, expected):
    advantages, own = jnp.asarray([1.0, 1.0, -1.0, -1.0, 0.0]), jnp.asarray([-1.0, 1.0, -1.0, 1.0, 1.0])
    got = kept(config_of("sampled", filter=name).distill, advantages, jnp.zeros(5), own)
    np.testing.assert_array_equal(got, expected)


def test_metrics_are_of_the_tokens_that_a_filter_keeps():
    """The others were not scored: what stands for their scores must not enter a mean."""
    expert, base, reference = draw(3)
    config = config_of("sampled", filter="rewarded")
    targets = targets_of(config, reference + 0.1, expert, base, reference)
    rewarded = jnp.arange(targets.mask.size) % 2 == 0
    targets = dataclasses.replace(targets, advantages=1.0 * rewarded)
    zeros = {name: jnp.where(rewarded, getattr(targets, name), 0) for name in ("signal", "reference_logprobs")}
    logits = jnp.roll(reference, 1, 0)
    measured = jax.jit(loss_and_metrics, static_argnums=0)
    _, scored = measured(config, logits, targets)
    _, filled = measured(config, logits, dataclasses.replace(targets, **zeros))
    for name in ("policy/reference_kl", "distill/utility_abs_mean"):
        assert filled.values()[name] == pytest.approx(float(scored.values()[name])), name
        assert filled.values()[name] > 0


def test_signals_combine_by_weight_or_by_vote():
    signals = jnp.asarray([[1.0, 1.0, -2.0], [1.0, -3.0, -1.0], [0.5, 1.0, 1.0]])
    weighted = config_of("sampled", weights=(1.0, 1.0, 2.0)).distill
    np.testing.assert_allclose(combine_signals(weighted, signals), [3.0, 0.0, -1.0])
    vote = config_of("sampled", weights=(1.0, 1.0, 1.0), combine="vote").distill
    np.testing.assert_allclose(combine_signals(vote, signals), [2.5, 0.0, -2.0])
    with pytest.raises(ValueError, match="1 entries for 3 signals"):
        combine_signals(config_of("sampled").distill, signals)


def test_overlap_of_two_lists_of_ids():
    a, b = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]]), jnp.asarray([[4, 9, 1, 0], [5, 6, 7, 8]])
    np.testing.assert_allclose(top_k_overlap(a, b), [0.5, 1.0])
