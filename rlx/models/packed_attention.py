"""Attention over packed rows as the update runs it: dense within a row, with a backward pass of its own.

Kept for the backward pass are the inputs, the output O and the log-sum-exp L of each query's scores S. With
P = e^(S - L) where seen, else 0, and cotangent dO (arXiv 2205.14135, appendix B):

    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ - Σ_d dO_d O_d)    dQ = dS K / √D    dK = dSᵀ Q / √D

All products run over arrays in which the heads of one key head lie below each other, [rows, kv_heads, heads · T, D]:
that way nothing of size T × T is ever transposed, and the sum over those heads is part of the product.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, PyTree

from rlx.models.layers import KEPT, wide


def packed_attention(
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows t t"],
) -> Float[Array, "rows t heads v"]:
    """Grouped-query softmax attention (arXiv 2305.13245) over the keys that `allowed` admits; 0 where there are none.

    Scores and softmax are float32, or float64 where the inputs are.
    """
    return differentiable(attend, pull)(query, key, value, allowed)


def attend(
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows s kv_heads d"],
    value: Float[Array, "rows s kv_heads v"],
    allowed: Bool[Array, "rows t s"],
) -> tuple[Float[Array, "rows t heads v"], Float[Array, "rows kv_heads q 1"]]:
    """(O, L), O in the dtype of values; q: the heads of each key head · t."""
    query, key, value = _all_stacked(query, key, value)
    scores = scores_of(query, key, allowed)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    mass = weights.sum(-1, keepdims=True)
    out = product("rkqs,rksd->rkqd", weights.astype(value.dtype), value) / mass
    return _seeing(allowed, _unstacked(out.astype(value.dtype), allowed.shape[1])), top + jnp.log(mass)


def pull(
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows s kv_heads d"],
    value: Float[Array, "rows s kv_heads v"],
    allowed: Bool[Array, "rows t s"],
    out: Float[Array, "rows t heads v"],
    logsumexp: Float[Array, "rows kv_heads q 1"],
    d_out: Float[Array, "rows t heads v"],
) -> tuple[Float[Array, "rows t heads d"], Float[Array, "rows s kv_heads d"], Float[Array, "rows s kv_heads v"]]:
    """(dQ, dK, dV), float32, or float64 where the inputs are: over several devices they are yet to be summed."""
    (length, seen), kv_heads = allowed.shape[1:], key.shape[2]
    query, key, value = _all_stacked(query, key, value)
    d_out = _seeing(allowed, d_out)
    shared = _stacked((wide(d_out) * wide(out)).sum(-1, keepdims=True), kv_heads)
    d_out = _stacked(d_out, kv_heads)
    d_query, d_key, d_value = gradients_of(query, key, value, allowed, logsumexp, shared, d_out)
    return _unstacked(d_query, length), _unstacked(d_key, seen), _unstacked(d_value, seen)


def gradients_of(
    query: Array, key: Array, value: Array, allowed: Array, logsumexp: Array, shared: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV) of stacked arrays, of a row or of a block of it. shared: Σ dO · O of each query, over its width."""
    weights = jnp.exp(scores_of(query, key, allowed) - logsumexp)
    d_weights = product("rkqd,rksd->rkqs", d_out, value)
    d_scores = (weights * (d_weights - shared) * query.shape[-1] ** -0.5).astype(query.dtype)
    d_query = product("rkqs,rksd->rkqd", d_scores, key)
    d_key = product("rkqs,rkqd->rksd", d_scores, query)
    d_value = product("rkqs,rkqd->rksd", weights.astype(value.dtype), d_out)
    return d_query, d_key, d_value


def differentiable(
    attend: Callable[..., tuple[Array, Array]], pull: Callable[..., tuple[Array, Array, Array]]
) -> Callable[..., Array]:
    """attention(query, key, value, *who sees whom) -> O, whose backward pass is not derived.

    attend: (the same) -> (O, L).
    pull: (the same, O, L, dO) -> (dQ, dK, dV), which are cast to what they are gradients of.
    """

    def forward(*inputs: PyTree[Array]) -> tuple[Array, tuple]:
        out, logsumexp = checkpoint_name(attend(*inputs), KEPT)
        return out, (*inputs, out, logsumexp)

    def backward(kept: tuple, d_out: Array) -> tuple[Array | None, ...]:
        *inputs, _, _ = kept
        gradients = (d.astype(x.dtype) for d, x in zip(pull(*kept, d_out), inputs[:3], strict=True))
        return *gradients, *(None for _ in inputs[3:])

    attention = jax.custom_vjp(lambda *inputs: forward(*inputs)[0])
    attention.defvjp(forward, backward)
    return attention


def _all_stacked(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    return _stacked(query, key.shape[2]), _stacked(key, key.shape[2]), _stacked(value, key.shape[2])


def _stacked(x: Array, kv_heads: int) -> Array:
    """[rows, T, heads, D] -> [rows, kv_heads, heads of each · T, D]"""
    rows, length, heads, dim = x.shape
    grouped = x.reshape(rows, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(rows, kv_heads, -1, dim)


def _unstacked(x: Array, length: int) -> Array:
    """[rows, kv_heads, heads of each · T, D] -> [rows, T, heads, D]"""
    rows, kv_heads, _, dim = x.shape
    return x.reshape(rows, kv_heads, -1, length, dim).transpose(0, 3, 1, 2, 4).reshape(rows, length, -1, dim)


def scores_of(query: Array, key: Array, allowed: Array) -> Array:
    """[rows, kv_heads, heads of each · t, s], lowest where not allowed."""
    scores = product("rkqd,rksd->rkqs", query, key) * query.shape[-1] ** -0.5
    blocks = scores.reshape(*scores.shape[:2], -1, *allowed.shape[1:])
    return jnp.where(allowed[:, None, None], blocks, jnp.finfo(scores.dtype).min).reshape(scores.shape)


def _seeing(allowed: Array, x: Array) -> Array:
    """`x` [rows, T, heads, D] where the query sees anything, else 0."""
    return jnp.where(allowed.any(-1)[:, :, None, None], x, 0)


def product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
