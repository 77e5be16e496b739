"""Packed rows that have everything attention must get right, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlx.models.layers import Ids

Attention = Callable[..., Array]  # of queries, keys, values
ROWS, TOKENS, HEADS = 2, 24, 6
# A prompt with two responses, a sequence of its own, padding; then two long ones, one of them padded out of its block.
SEGMENTS = [[1] * 7 + [2] * 4 + [3] * 5 + [4] * 6 + [0] * 2, [1] * 13 + [0] * 11]
PREFIXES = [[0] * 7 + [1] * 9 + [0] * 8, [0] * 24]
POSITIONS = [[*range(7), *range(7, 11), *range(7, 12), *range(6), 0, 1], [*range(13), *range(11)]]


def packed_ids() -> Ids:
    return Ids(*(jnp.asarray(x, jnp.int32) for x in (POSITIONS, SEGMENTS, PREFIXES)))


def random_arrays(kv_heads: int, heads: int = HEADS) -> tuple[Array, Array, Array]:
    """Queries, keys, and values of another width; float64 where that is on."""
    random = np.random.default_rng(0)
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 5))
    query, key, value = (jnp.asarray(random.normal(size=(ROWS, TOKENS, *shape))) for shape in shapes)
    return query, key, value


def attended(attention: Attention, arrays: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """(output, gradients of a weighted sum of it)."""
    mixing = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(attention, *arrays).shape))

    def total(*arrays: Array) -> tuple[Array, Array]:
        out = attention(*arrays)
        return (out * mixing).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)
    return out, *gradients


def within_rounding(attention: Attention, whole: Attention) -> bool:
    """Of bfloat16 arrays: is `attention` as close to `whole` in float32 as `whole` is itself, for each result?"""
    query, key, value = (x.astype(jnp.bfloat16) for x in random_arrays(2))
    wide = query.astype(jnp.float32), key.astype(jnp.float32), value.astype(jnp.float32)
    exact = attended(whole, wide)
    ours, least = (
        [_difference(*pair) for pair in zip(attended(f, (query, key, value)), exact, strict=True)]
        for f in (attention, whole)
    )
    return all(0 < got < 1.1 * wanted for got, wanted in zip(ours, least, strict=True))


def largest_difference(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> float:
    """Over the size of each."""
    return max(_difference(*pair) for pair in zip(ours, theirs, strict=True))


def _difference(ours: Array, theirs: Array) -> float:
    a, b = (np.asarray(x, np.promote_types(theirs.dtype, np.float32)) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
