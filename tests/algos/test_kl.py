import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algos.kl import kl, penalised_rewards
from tests.oracle_adapter import base_objective

LOGITS = jnp.asarray([0.3, -1.0, 0.7, 0.1])
REFERENCE = jax.nn.log_softmax(jnp.asarray([0.0, 0.5, 0.2, -0.4]))


def exact(logits):
    logprobs = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - REFERENCE))


def expected_gradient(estimator):
    """Of the estimator in the loss: E over tokens of the policy, which is held fixed, of its gradient."""
    policy = jax.nn.softmax(LOGITS)
    return jax.grad(lambda logits: jnp.sum(policy * kl(estimator, jax.nn.log_softmax(logits), REFERENCE)))(LOGITS)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    logprobs = jax.nn.log_softmax(LOGITS)
    mean = jnp.sum(jnp.exp(logprobs) * kl(estimator, logprobs, REFERENCE))
    np.testing.assert_allclose(mean, exact(LOGITS), rtol=1e-5)


def test_k2_has_the_gradient_of_the_kl_and_k1_has_none():
    np.testing.assert_allclose(expected_gradient("k2"), jax.grad(exact)(LOGITS), atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k1"), 0, atol=1e-6)


def test_k3_is_never_negative():
    d = jnp.linspace(-3, 3, 31)
    assert (kl("k3", d, jnp.zeros_like(d)) >= 0).all()


def test_penalised_rewards_subtract_the_sample_s_own_divergence():
    config = base_objective(kl_coefficient=0.5, kl_estimator="k1", kl_placement="reward")
    logprobs = jnp.asarray([-1.0, -2.0, jnp.nan, -0.5])
    reference = jnp.asarray([-1.5, -1.0, jnp.inf, -0.5])
    mask, samples = jnp.asarray([True, True, False, True]), jnp.asarray([0, 0, 77, 1])
    got = penalised_rewards(config, jnp.asarray([1.0, 0.0, 3.0]), logprobs, reference, mask, samples)
    np.testing.assert_allclose(got, [1.0 - 0.5 * (0.5 - 1.0), 0.0, 3.0], rtol=1e-6)
