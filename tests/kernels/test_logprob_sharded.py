"""The log-prob head inside shard_map: rows of the head over 'tp', tokens over 'dp', against one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.logprob import TokenStats, token_loss, token_stats

from tests.kernels.logprob_suite import ENTRIES, assert_close, entries, token_loss_in_chunks_of_5

TOKENS, VOCAB, K = 12, 104, 5
ROWS, TOKEN_MATRIX, TOKEN_VECTOR = PartitionSpec("tp", None), PartitionSpec("dp", None), PartitionSpec("dp")
OUT = TokenStats._make([TOKEN_VECTOR, TOKEN_VECTOR, TOKEN_VECTOR, TOKEN_MATRIX])
IN_SPECS = (TOKEN_MATRIX, ROWS, TOKEN_VECTOR, TOKEN_MATRIX)

WEIGHTS = np.cos(np.arange(TOKENS))

# one token axis and one vocabulary axis alone, both, and the largest; all four for every implementation are slow
every_mesh = pytest.mark.parametrize("dp, tp", [(2, 1), (1, 2), (2, 4), (1, 8)])


def arrays(dtype=jnp.float32, width=8):
    """Candidates and targets fall into every shard; the first shard boundaries of TP 2, 4 and 8 are among them."""
    rng = np.random.default_rng(0)
    candidates = rng.integers(0, VOCAB, (TOKENS, K))
    candidates[:, :4] = [13, 12, 26, 52]
    targets = rng.integers(0, VOCAB, TOKENS)
    targets[:2] = [51, 52]
    hidden = jnp.asarray(rng.normal(size=(TOKENS, width)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCAB, width)), dtype)
    return hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(candidates, jnp.int32)


def make_mesh(dp, tp):
    return jax.make_mesh((dp, tp), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[: dp * tp])


def sharded(entry, dp, tp, **options):
    def stats(hidden, head, targets, candidates):
        return entry.call(hidden, head, targets, candidates, temperature=0.8, vocab_axis="tp")

    return jax.shard_map(stats, mesh=make_mesh(dp, tp), in_specs=IN_SPECS, out_specs=OUT, **options)


XLA = ENTRIES["xla"]


def dense(hidden, head, *ids):
    exact = hidden.astype(jnp.float32), head.astype(jnp.float32)
    return token_stats(*exact, *ids, temperature=0.8, implementation="reference")


def per_token(out, weights):
    candidates = jnp.asarray(out.candidate_logprobs) @ jnp.sin(jnp.arange(K))
    return ((out.logprob + 0.3 * out.logsumexp - 0.5 * out.entropy + candidates) * weights).sum()


def loss(stats, given):
    return lambda hidden, head: per_token(stats(hidden, head, *given[2:]), WEIGHTS)


@functools.cache
def on_one_device(dtype, width, scale=1.0):
    """(outputs, gradients), by the dense definition."""
    given = arrays(dtype, width)

    def total(hidden, head):
        out = dense(hidden, head, *given[2:])
        return per_token(out, WEIGHTS * jnp.repeat(jnp.asarray(scale), TOKENS // np.size(scale))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*given[:2])
    return out, gradients


# The interpreter of Mosaic runs one device at a time: its shards are merged in test_logprob_mosaic.py.
@entries("mosaic")
@every_mesh
def test_values_and_gradients_are_those_of_one_device(entry, dp, tp):
    given = arrays(entry.dtype, entry.width)

    def total(hidden, head):
        out = sharded(entry, dp, tp)(hidden, head, *given[2:])
        return per_token(out, WEIGHTS), out

    (_, out), got = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*given[:2])
    wanted_out, wanted = on_one_device(entry.dtype, entry.width)
    assert_close(out, wanted_out)
    assert [x.dtype for x in got] == [entry.dtype] * 2
    assert_close(got, wanted, entry.tolerance)


def test_gradients_taken_inside_shard_map_are_those_of_one_device():
    """Each device differentiates its own tokens' loss: the head's gradient is still summed over 'dp'."""

    def step(hidden, head, targets, candidates, weights):
        def total(hidden, head):
            call = ENTRIES["xla_small_tiles"].call
            return per_token(call(hidden, head, targets, candidates, temperature=0.8, vocab_axis="tp"), weights)

        return jax.grad(total, (0, 1))(hidden, head)

    in_specs, out_specs = (*IN_SPECS, TOKEN_VECTOR), (TOKEN_MATRIX, ROWS)
    run = jax.shard_map(step, mesh=make_mesh(2, 2), in_specs=in_specs, out_specs=out_specs)
    assert_close(jax.jit(run)(*arrays(), WEIGHTS), on_one_device(jnp.float32, 8)[1])


def device_loss(run, hidden, head, targets, candidates, weights):
    return run(per_token, hidden, head, targets, candidates, weights, temperature=0.8, vocab_axis="tp")[0]


@pytest.mark.parametrize("run", [token_loss, token_loss_in_chunks_of_5], ids=["one_chunk", "chunks_of_5"])
def test_a_loss_differentiated_in_the_forward_pass_is_that_of_one_device(run):
    def local(*x):
        return jax.lax.psum(device_loss(run, *x), "dp")

    in_specs, given = (*IN_SPECS, TOKEN_VECTOR), arrays()
    whole = jax.shard_map(local, mesh=make_mesh(2, 2), in_specs=in_specs, out_specs=PartitionSpec())
    got, gradients = jax.jit(jax.value_and_grad(whole, (0, 1)))(*given, WEIGHTS)
    out, wanted = on_one_device(jnp.float32, 8)
    np.testing.assert_allclose(got, per_token(out, WEIGHTS), rtol=1e-5)
    assert_close(gradients, wanted)


def test_a_loss_differentiated_and_scaled_on_each_device_is_that_of_one_device():
    def step(hidden, head, *rest):
        scale = 1.0 + jax.lax.axis_index("dp")
        return jax.grad(lambda *x: scale * device_loss(token_loss, *x, *rest), (0, 1))(hidden, head)

    in_specs, out_specs = (*IN_SPECS, TOKEN_VECTOR), (TOKEN_MATRIX, ROWS)
    run = jax.shard_map(step, mesh=make_mesh(2, 2), in_specs=in_specs, out_specs=out_specs)
    assert_close(jax.jit(run)(*arrays(), WEIGHTS), on_one_device(jnp.float32, 8, scale=(1.0, 2.0))[1])


def test_a_loss_that_differs_between_shards_of_the_vocabulary_is_refused():
    def differing(hidden, head, targets, candidates):
        weights = jnp.ones(TOKENS) * jax.lax.axis_index("tp")
        return token_loss(per_token, hidden, head, targets, candidates, weights, vocab_axis="tp")[0]

    with pytest.raises(ValueError, match=r"varies over vocab_axis='tp'.*the same on every shard"):
        jax.jit(jax.shard_map(differing, mesh=make_mesh(1, 2), in_specs=IN_SPECS, out_specs=PartitionSpec("tp")))(
            *arrays()
        )


@pytest.mark.parametrize("taken", ["value", "gradient outside", "gradient inside"])
def test_it_runs_without_jit(taken):
    given = arrays()

    def both(hidden, head, targets, candidates, weights):
        """token_stats and token_loss, this device's part of their sum over the tokens."""
        stats = XLA.call(hidden, head, targets, candidates, temperature=0.8, vocab_axis="tp")
        options: dict[str, Any] = {"temperature": 0.8, "vocab_axis": "tp"}
        return per_token(stats, weights), token_loss(per_token, hidden, head, targets, candidates, weights, **options)[
            0
        ]

    def body(*x):
        if taken == "gradient inside":
            return [jax.grad(lambda h: both(h, *x[1:])[i])(x[0]) for i in range(2)]  # noqa: B023
        return [jax.lax.psum(value, "dp") for value in both(*x)]

    out_specs = [TOKEN_MATRIX if taken == "gradient inside" else PartitionSpec()] * 2
    run = jax.shard_map(body, mesh=make_mesh(2, 2), in_specs=(*IN_SPECS, TOKEN_VECTOR), out_specs=out_specs)
    out, wanted = on_one_device(jnp.float32, 8)
    if taken == "gradient outside":
        got = [jax.grad(lambda h: run(h, *given[1:], WEIGHTS)[i])(given[0]) for i in range(2)]  # noqa: B023
    else:
        got = run(*given, WEIGHTS)
    assert_close(got, [per_token(out, WEIGHTS) if taken == "value" else wanted[0]] * 2)


def test_a_shard_whose_logits_are_all_minus_infinity_adds_nothing():
    hidden, head, targets, candidates = arrays()
    hidden, head = hidden.at[:, 0].set(1e20), head.at[:, 0].set(0)
    head = head.at[52:].set(0).at[52:, 0].set(-1e20)
    given = hidden, head, targets % 52, candidates % 52
    narrow = hidden, head[:52], targets % 52, candidates % 52
    assert_close(jax.jit(sharded(XLA, 1, 2))(*given), jax.jit(dense)(*narrow))
    d_hidden, d_head = jax.jit(jax.grad(loss(sharded(XLA, 1, 2), given), (0, 1)))(hidden, head)
    assert_close(d_hidden[:, 1:], jax.jit(jax.grad(loss(dense, narrow)))(*narrow[:2])[:, 1:])
    assert np.isfinite(d_head).all()


def test_ids_outside_the_whole_vocabulary_give_nan():
    hidden, head, targets, candidates = arrays()
    out = jax.jit(sharded(XLA, 1, 2))(hidden, head, targets.at[3].set(VOCAB), candidates.at[4, 0].set(-1))
    assert np.flatnonzero(np.isnan(out.logprob)).tolist() == [3]
    assert np.argwhere(np.isnan(out.candidate_logprobs)).tolist() == [[4, 0]]


@pytest.mark.parametrize("trained, sums", [((0,), 2), ((0, 1), 3)], ids=["frozen", "trained"])
def test_one_maximum_and_one_sum_forwards_and_one_sum_a_gradient(trained, sums):
    given = arrays()
    text = (
        jax.jit(jax.grad(loss(sharded(ENTRIES["xla_small_tiles"], 2, 2), given), trained)).lower(*given[:2]).as_text()
    )
    reductions = text.split('"stablehlo.all_reduce"')[1:]
    maxima = ["stablehlo.maximum" in r.split("stablehlo.return")[0] for r in reductions]
    assert (sum(maxima), len(maxima) - sum(maxima)) == (1, sums)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_untracked_shards_are_refused(name):
    given = arrays()
    with pytest.raises(ValueError, match=rf"{name}: head does not vary over vocab_axis='tp'.*check_vma=True"):
        sharded(ENTRIES[name], 1, 2, check_vma=False)(*given)
    with pytest.raises(ValueError, match="does not vary"):
        jax.shard_map(
            lambda h, w, y: token_stats(h, w, y, None, vocab_axis="tp"),
            mesh=make_mesh(1, 2),
            in_specs=(TOKEN_MATRIX, PartitionSpec(), TOKEN_VECTOR),
            out_specs=OUT._replace(candidate_logprobs=None),
        )(*given[:3])
