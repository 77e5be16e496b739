"""Long rows: what a float32 sum over a whole vocabulary may lose."""

import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import token_stats

VOCAB = 49_157  # no multiple of anything


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_long_vocabulary_costs_no_accuracy(implementation):
    """Nearly flat logits, so that every column matters: summed one by one, float32 loses 1e-4 here."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 32)).astype(np.float32)
    head = (0.05 * rng.normal(size=(VOCAB, 32))).astype(np.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, 4), jnp.int32)
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    logsumexp = np.log(np.exp(logits).sum(1))
    logprobs = logits - logsumexp[:, None]
    stats = token_stats(jnp.asarray(hidden), jnp.asarray(head), targets, None, implementation=implementation)
    np.testing.assert_allclose(stats.logsumexp, logsumexp, rtol=0, atol=1e-5)
    np.testing.assert_allclose(stats.entropy, -(np.exp(logprobs) * logprobs).sum(1), rtol=0, atol=1e-5)
