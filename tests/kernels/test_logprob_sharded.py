"""The log-prob head inside shard_map: rows of the head over 'tp', tokens over 'dp', against one device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.logprob import TokenStats, token_stats, xla

TOKENS, VOCAB, WIDTH, K = 12, 52, 8, 5
IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": functools.partial(token_stats, implementation="reference"),
    "xla": functools.partial(token_stats, implementation="xla"),
    "xla_chunks_of_4": functools.partial(xla.token_stats, chunk=4),
}
ROWS, TOKEN_MATRIX, TOKEN_VECTOR = PartitionSpec("tp", None), PartitionSpec("dp", None), PartitionSpec("dp")
OUT = TokenStats._make([TOKEN_VECTOR, TOKEN_VECTOR, TOKEN_VECTOR, TOKEN_MATRIX])

every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
every_mesh = pytest.mark.parametrize("dp, tp", [(1, 2), (1, 4), (2, 2), (2, 1)])


def arrays(dtype=jnp.float32):
    """Candidates and targets fall into every shard; the first shard boundary of TP 2 and TP 4 is among them."""
    rng = np.random.default_rng(0)
    candidates = rng.integers(0, VOCAB, (TOKENS, K))
    candidates[:, :3] = [13, 12, 26]
    targets = rng.integers(0, VOCAB, TOKENS)
    targets[:2] = [25, 26]
    hidden = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), dtype)
    return hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(candidates, jnp.int32)


def make_mesh(dp, tp):
    return jax.make_mesh((dp, tp), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[: dp * tp])


def sharded(name, dp, tp, **options):
    def stats(hidden, head, targets, candidates):
        return IMPLEMENTATIONS[name](hidden, head, targets, candidates, temperature=0.8, vocab_axis="tp")

    in_specs = (TOKEN_MATRIX, ROWS, TOKEN_VECTOR, TOKEN_MATRIX)
    return jax.shard_map(stats, mesh=make_mesh(dp, tp), in_specs=in_specs, out_specs=OUT, **options)


def dense(*args):
    return token_stats(*args, temperature=0.8, implementation="reference")


def loss(stats, given):
    def total(hidden, head):
        out = stats(hidden, head, *given[2:])
        weights = jnp.cos(jnp.arange(TOKENS))
        candidates = jnp.asarray(out.candidate_logprobs) @ jnp.sin(jnp.arange(K))
        return ((out.logprob + 0.3 * out.logsumexp - 0.5 * out.entropy + candidates) * weights).sum()

    return total


def assert_close(got, wanted, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max())


@every_implementation
@every_mesh
def test_values_and_gradients_are_those_of_one_device(name, dp, tp):
    given = arrays()
    assert_close(jax.jit(sharded(name, dp, tp))(*given), dense(*given))
    got = jax.jit(jax.grad(loss(sharded(name, dp, tp), given), (0, 1)))(*given[:2])
    assert_close(got, jax.grad(loss(dense, given), (0, 1))(*given[:2]))


def test_gradients_taken_inside_shard_map_are_those_of_one_device():
    """Each device differentiates its own tokens' loss: the head's gradient is still summed over 'dp'."""
    given, per_device = arrays(), IMPLEMENTATIONS["xla_chunks_of_4"]

    def step(hidden, head, targets, candidates):
        def total(hidden, head):
            out = per_device(hidden, head, targets, candidates, temperature=0.8, vocab_axis="tp")
            return sum(sign * x.sum() for sign, x in zip((1, 1, -1, 1), jax.tree.leaves(out), strict=True))

        return jax.grad(total, (0, 1))(hidden, head)

    in_specs = (TOKEN_MATRIX, ROWS, TOKEN_VECTOR, TOKEN_MATRIX)
    run = jax.shard_map(step, mesh=make_mesh(2, 2), in_specs=in_specs, out_specs=(TOKEN_MATRIX, ROWS))

    def total(hidden, head):
        out = dense(hidden, head, *given[2:])
        return sum(sign * x.sum() for sign, x in zip((1, 1, -1, 1), jax.tree.leaves(out), strict=True))

    assert_close(jax.jit(run)(*given), jax.grad(total, (0, 1))(*given[:2]))


def test_gradients_of_bfloat16_sum_shards_in_float32():
    given = arrays(jnp.bfloat16)
    got = jax.jit(jax.grad(loss(sharded("xla", 2, 2), given), (0, 1)))(*given[:2])
    assert [x.dtype for x in got] == [jnp.bfloat16] * 2
    exact = tuple(x.astype(jnp.float32) for x in given[:2])
    assert_close(got, jax.grad(loss(dense, given), (0, 1))(*exact), tolerance=1e-2)


def test_a_shard_whose_logits_are_all_minus_infinity_adds_nothing():
    hidden, head, targets, candidates = arrays()
    hidden, head = hidden.at[:, 0].set(1e20), head.at[:, 0].set(0)
    head = head.at[26:].set(0).at[26:, 0].set(-1e20)
    given = hidden, head, targets % 26, candidates % 26
    narrow = hidden, head[:26], targets % 26, candidates % 26
    assert_close(jax.jit(sharded("xla", 1, 2))(*given), dense(*narrow))
    d_hidden, d_head = jax.jit(jax.grad(loss(sharded("xla", 1, 2), given), (0, 1)))(hidden, head)
    assert_close(d_hidden[:, 1:], jax.grad(loss(dense, narrow))(*narrow[:2])[:, 1:])
    assert np.isfinite(d_head).all()


def test_ids_outside_the_whole_vocabulary_give_nan():
    hidden, head, targets, candidates = arrays()
    out = jax.jit(sharded("xla", 1, 2))(hidden, head, targets.at[3].set(VOCAB), candidates.at[4, 0].set(-1))
    assert np.flatnonzero(np.isnan(out.logprob)).tolist() == [3]
    assert np.argwhere(np.isnan(out.candidate_logprobs)).tolist() == [[4, 0]]


@pytest.mark.parametrize("trained, sums", [((0,), 2), ((0, 1), 3)], ids=["frozen", "trained"])
def test_one_maximum_and_one_sum_forwards_and_one_sum_a_gradient(trained, sums):
    given = arrays()
    text = jax.jit(jax.grad(loss(sharded("xla_chunks_of_4", 2, 2), given), trained)).lower(*given[:2]).as_text()
    reductions = text.split('"stablehlo.all_reduce"')[1:]
    maxima = ["stablehlo.maximum" in r.split("stablehlo.return")[0] for r in reductions]
    assert (sum(maxima), len(maxima) - sum(maxima)) == (1, sums)


def test_xla_refuses_untracked_shards_and_says_why():
    given = arrays()
    with pytest.raises(ValueError, match=r"xla: head does not vary over vocab_axis='tp'.*check_vma=True"):
        sharded("xla", 1, 2, check_vma=False)(*given)
    with pytest.raises(ValueError, match="does not vary"):
        jax.shard_map(
            lambda h, w, y: token_stats(h, w, y, None, vocab_axis="tp"),
            mesh=make_mesh(1, 2),
            in_specs=(TOKEN_MATRIX, PartitionSpec(), TOKEN_VECTOR),
            out_specs=OUT._replace(candidate_logprobs=None),
        )(*given[:3])
