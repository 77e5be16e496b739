"""float64 is for checks of what surrounds the head, so it must hold through values, gradients, tiles and shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rlx_kernels.logprob import token_loss, token_stats

T, D, V, K = 12, 8, 96, 5


@pytest.fixture
def arrays():
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        hidden, head = jnp.asarray(draw.normal(size=(T, D))), jnp.asarray(draw.normal(size=(V, D)))
        yield hidden, head, jnp.asarray(draw.integers(V, size=T)), jnp.asarray(draw.integers(V, size=(T, K)))


def dense(hidden, head, targets, candidates):
    logprobs = jax.nn.log_softmax(hidden @ head.T)
    picked = jnp.take_along_axis(logprobs, jnp.concatenate([targets[:, None], candidates], 1), 1)
    return picked.sum() - 0.3 * (jnp.exp(logprobs) * logprobs).sum()


def ours(hidden, head, targets, candidates, **options):
    stats = token_stats(hidden, head, targets, candidates, **options)
    return stats.logprob.sum() + stats.candidate_logprobs.sum() + 0.3 * stats.entropy.sum()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_values_and_gradients_are_float64(arrays, implementation):
    want, wanted = jax.value_and_grad(dense, argnums=(0, 1))(*arrays)
    got, given = jax.value_and_grad(ours, argnums=(0, 1))(*arrays, implementation=implementation)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=1e-13)
    for ours_, dense_ in zip(given, wanted, strict=True):
        np.testing.assert_allclose(ours_, dense_, rtol=1e-11, atol=1e-12)


def test_over_shards_of_the_vocabulary(arrays):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        lambda *x: ours(*x, vocab_axis="tp"), mesh=mesh, in_specs=(P(), P("tp"), P(), P()), out_specs=P()
    )
    want, wanted = jax.value_and_grad(dense, argnums=(0, 1))(*arrays)
    got, given = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(*arrays)
    np.testing.assert_allclose(got, want, rtol=1e-13)
    for ours_, dense_ in zip(given, wanted, strict=True):
        np.testing.assert_allclose(ours_, dense_, rtol=1e-11, atol=1e-12)


def test_the_fused_loss_refuses_it(arrays):
    hidden, head, targets, candidates = arrays
    with pytest.raises(ValueError, match="token_loss has no float64"):
        token_loss(lambda stats, _: stats.logprob.sum(), hidden, head, targets, candidates)
