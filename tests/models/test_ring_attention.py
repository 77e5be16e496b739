"""Attention of rows that devices share, by ring and by blocks of gathered keys, against whole rows on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models.blockwise import Blocks
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention
from rlx.models.ring_attention import merged
from rlx.models.sharded_attention import WHOLE, in_blocks, in_ring, sharded
from rlx.parallel.context import places, zigzag
from rlx.parallel.layout import parse_layout
from rlx.parallel.mesh import Placement, make_mesh
from tests.models.packed_rows import TOKENS, attended, largest_difference, packed_ids, random_arrays, within_rounding


def placed(layout: str) -> Placement:
    return Placement(make_mesh(parse_layout(layout)), parse_layout(layout))


def over(placement: Placement, ring: bool, blocks: Blocks, *given):
    """Attention of arrays that lie in zig-zag order."""
    *arrays, ids = given
    if ring:
        return sharded(placement, in_ring(blocks, placement.layout.cp), *arrays, ids)
    return sharded(placement, in_blocks(blocks), *arrays, ids, ids)


@pytest.mark.parametrize(
    "layout, kv_heads, window, ring",
    [("CP2", 2, None, True), ("CP4", 2, 5, True), ("TP2 CP2 DP2", 1, None, True), ("TP2 CP2 DP2", 2, 5, False)],
)
def test_values_and_gradients_are_those_of_one_device(layout, kv_heads, window, ring):
    placement = placed(layout)
    order = zigzag(TOKENS, placement.layout.cp)
    back = places(order)
    with jax.enable_x64(True):
        ids, arrays = packed_ids(), random_arrays(kv_heads)
        moved = Ids(*(x[:, order] for x in ids))
        blocks = Blocks(TOKENS // placement.layout.cp // 2, window)

        def ours(*arrays):
            return over(placement, ring, blocks, *(x[:, order] for x in arrays), moved)[:, back]

        whole = attended(lambda *x: packed_attention(*x, visible(ids, ids, window)), arrays)
        assert largest_difference(attended(ours, arrays), whole) < 1e-12


@pytest.mark.parametrize("ring", [True, False])
def test_gradients_of_bfloat16_are_rounded_after_their_sum_over_devices(ring):
    placement = placed("CP4")
    order = zigzag(TOKENS, 4)
    ids = packed_ids()
    moved = Ids(*(x[:, order] for x in ids))

    def shared(*arrays):
        return over(placement, ring, Blocks(3, None), *(x[:, order] for x in arrays), moved)[:, places(order)]

    whole = lambda *x: packed_attention(*x, visible(ids, ids, None))  # noqa: E731
    assert within_rounding(shared, whole)
    masked = lambda *x: sharded(placement, WHOLE, *x, visible(ids, ids, None))  # noqa: E731
    assert ring or within_rounding(masked, whole)


def test_results_over_some_keys_each_are_merged():
    scores, values = (np.random.default_rng(i).normal(size=(3, 8)) for i in range(2))
    part = lambda s, v: (  # noqa: E731
        (jax.nn.softmax(s) * v).sum(-1, keepdims=True),
        jax.nn.logsumexp(s, axis=-1, keepdims=True),
    )
    with jax.enable_x64(True):
        parts = [part(jnp.asarray(scores[:, at]), jnp.asarray(values[:, at])) for at in (slice(0, 3), slice(3, 8))]
        for got, wanted in zip(merged(*parts), part(jnp.asarray(scores), jnp.asarray(values)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-13)
        nothing = jnp.full_like(parts[0][0], 7.0), jnp.full_like(parts[0][1], jnp.finfo(jnp.float64).min)
        assert (merged(nothing, parts[0])[0] == parts[0][0]).all()


def test_a_device_has_the_keys_of_its_own_tokens_and_as_many_under_way():
    """Both passes over a row of 8,192 tokens, wide keys and narrow blocks: what a ring saves is the gathered keys."""
    tokens, width = 8192, 64
    placement = placed("CP8")
    arrays = [jax.ShapeDtypeStruct((1, tokens, heads, width), jnp.float32) for heads in (8, 8, 8)]
    ids = Ids(*(jax.ShapeDtypeStruct((1, tokens), jnp.int32) for _ in range(3)))

    def temporaries(ring: bool) -> int:
        total = lambda *x: (over(placement, ring, Blocks(64, None), *x) ** 2).sum()  # noqa: E731
        where = jax.NamedSharding(placement.mesh, jax.P("dp", "cp"))
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (*arrays, ids))
        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    keys = tokens * 8 * width * 4
    assert temporaries(ring=False) > 4 * keys, "keys and values, and a gradient of each"
    assert temporaries(ring=True) < 3 * keys
