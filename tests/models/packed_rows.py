"""Packed rows that have everything attention must get right, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlx.models.layers import Ids

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


def attended(attention: Callable[..., Array], arrays: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """(output, gradients of a weighted sum of it)."""
    mixing = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(attention, *arrays).shape))

    def total(*arrays: Array) -> tuple[Array, Array]:
        out = attention(*arrays)
        return (out * mixing).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays)
    return out, *gradients


def largest_difference(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> float:
    """Over the size of each."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
