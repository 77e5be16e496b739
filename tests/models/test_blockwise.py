"""Attention by blocks against scores held whole, in float64: values, gradients, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models.blockwise import ACCELERATOR, CPU, Blocks, block_size, blockwise_attention, default_block
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention
from tests.models.packed_rows import (
    ROWS,
    TOKENS,
    attended,
    largest_difference,
    packed_ids,
    random_arrays,
    within_rounding,
)


@pytest.mark.parametrize("size, window, kv_heads", [(4, None, 2), (5, 3, 2), (8, 6, 6), (TOKENS, None, 1)])
def test_values_and_gradients_are_those_of_whole_rows(size, window, kv_heads):
    with jax.enable_x64(True):
        ids, arrays = packed_ids(), random_arrays(kv_heads)
        ours = attended(lambda *x: blockwise_attention(Blocks(size, window), *x, ids), arrays)
        whole = attended(lambda *x: packed_attention(*x, visible(ids, ids, window)), arrays)
        assert largest_difference(ours, whole) < 1e-12
        assert not ours[0][np.asarray(ids.segments) == 0].any()


@pytest.mark.parametrize("size", [4, 8])
def test_bfloat16_is_rounded_as_over_whole_rows(size):
    ids = packed_ids()
    blocks = lambda *x: blockwise_attention(Blocks(size, None), *x, ids)  # noqa: E731
    assert within_rounding(blocks, lambda *x: packed_attention(*x, visible(ids, ids, None)))


def test_tokens_may_lie_in_any_order():
    with jax.enable_x64(True):
        ids, arrays = packed_ids(), random_arrays(2)
        order = np.random.default_rng(3).permutation(TOKENS)
        moved = Ids(*(x[:, order] for x in ids))
        out = blockwise_attention(Blocks(4, None), *(x[:, order] for x in arrays), moved)
        np.testing.assert_allclose(
            out, blockwise_attention(Blocks(4, None), *arrays, ids)[:, order], rtol=0, atol=1e-13
        )


def test_blocks_that_nobody_sees_are_skipped():
    """NaN times a weight of 0 is NaN, so what comes out finite was not multiplied."""
    positions = jnp.broadcast_to(jnp.arange(16), (ROWS, 16))
    ids = Ids(positions, jnp.ones_like(positions), jnp.zeros_like(positions))
    query, key, value = (x[:, :16] for x in random_arrays(2))
    later = jnp.arange(16)[None, :, None, None] >= 8
    key, value = jnp.where(later, jnp.nan, key), jnp.where(later, jnp.nan, value)
    attention = lambda *x: blockwise_attention(Blocks(8, None), *x, ids)  # noqa: E731
    out, back = jax.vjp(attention, query, key, value)
    assert jnp.isfinite(out[:, :8]).all()
    assert not jnp.isfinite(out[:, 8:]).any()
    assert jnp.isfinite(back(jnp.where(later, 0.0, 1.0) * jnp.ones_like(out))[0][:, :8]).all()
    far = blockwise_attention(Blocks(4, 2), query, key[:, ::-1], value[:, ::-1], ids)
    assert jnp.isfinite(far[:, 12:]).all(), "further back than the window"


def test_memory_is_that_of_blocks():
    """Both passes of 8 heads over a row of 2,048 tokens: one array of scores takes 128 MiB. Layers are a loop and
    recomputed, as the update has them."""
    tokens, heads = 2048, 8
    arrays = [jax.ShapeDtypeStruct((1, tokens, n, 32), jnp.float32) for n in (heads, 2, 2)]
    ids = Ids(*(jax.ShapeDtypeStruct((1, tokens), jnp.int32) for _ in range(3)))

    def temporaries(attention) -> int:
        def total(query, key, value, ids):
            layer = jax.checkpoint(lambda q, _: (attention(q, key, value, ids), None))
            return (jax.lax.scan(layer, query, None, 2)[0] ** 2).sum()

        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = heads * tokens**2 * 4
    assert temporaries(lambda q, k, v, ids: packed_attention(q, k, v, visible(ids, ids, None))) > scores
    assert temporaries(lambda *x: blockwise_attention(Blocks(256, None), *x)) < scores / 4


def test_blocks_by_the_length_of_a_row():
    for rule, accelerator in ((CPU, False), (ACCELERATOR, True)):
        assert default_block(rule.whole, accelerator=accelerator) == 0
        assert default_block(4 * rule.whole, accelerator=accelerator) == rule.block
    assert block_size(0, 4 * CPU.whole) == 0
    assert block_size(256, 256) == 0
    assert block_size(128, 256) == 128
    assert block_size(0, 64, 2, always=True) == 16, "a part of the four that two ranks deal a row out in"
    assert block_size(400, 5600, 4) == 350, "two blocks for each of eight parts"
