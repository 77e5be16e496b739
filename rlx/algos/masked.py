"""Reductions over the tokens that count.

A masked position may hold anything, NaN and infinities included. `0 * inf` is NaN, in the value and in the gradient, so
masking is a `where` *before* the mathematics (`fill`: nothing that is computed from it can overflow) and a `where`
*after* it (the sums here).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

_FEW = 1024  # up to so many ids all pairs are compared: that compiles faster than a sort


def fill(mask: Bool[Array, " tokens"], x: Shaped[Array, "tokens ..."], value: float = 0) -> Shaped[Array, "tokens ..."]:
    """x where `mask`, `value` elsewhere; trailing axes of x follow their token."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, jnp.asarray(value, x.dtype))


def masked_sum(mask: Bool[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, ""]:
    """Σ x over the mask."""
    return jnp.sum(jnp.where(mask, x, 0))


def masked_mean(mask: Bool[Array, "..."], x: Shaped[Array, "..."]) -> Float[Array, ""]:
    """Mean of x over the mask; 0 where the mask is empty."""
    return masked_sum(mask, x) / jnp.maximum(jnp.sum(mask), 1)


def dense_ids(mask: Bool[Array, " tokens"], ids: Int[Array, " tokens"]) -> Int[Array, " tokens"]:
    """Ids renumbered to 0 ... tokens - 1, equal where they were equal; masked tokens share one id.

    What a slice knows of its sequences are ids of the whole batch; sums over them need no more than `tokens` bins.
    """
    ids = jnp.where(mask, ids, jnp.iinfo(ids.dtype).min)
    if 0 < ids.size <= _FEW:
        return jnp.argmax(ids[:, None] == ids, axis=1)  # where the first of them is
    _, inverse = jnp.unique(ids, return_inverse=True, size=ids.shape[0])
    return inverse.reshape(ids.shape)


def sum_by_id(
    mask: Bool[Array, " tokens"], x: Float[Array, " tokens"], ids: Int[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """To every token the sum of x over the unmasked tokens of its id; ids are in [0, tokens)."""
    return jax.ops.segment_sum(jnp.where(mask, x, 0), ids, num_segments=ids.shape[0])[ids]


def mean_by_id(
    mask: Bool[Array, " tokens"], x: Float[Array, " tokens"], ids: Int[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """To every token the mean of x over the unmasked tokens of its id; ids are in [0, tokens)."""
    count = sum_by_id(mask, jnp.ones_like(x), ids)
    return sum_by_id(mask, x, ids) / jnp.maximum(count, 1)
