"""Packed causal attention in plain XLA, on any backend: the scores of one chunk of queries at a time, exact.

Kept for the backward pass are the inputs, the output O and the log-sum-exp L of each query's scores S. With
P = e^(S - L) where seen, else 0, and cotangent dO:

    dV = Pᵀ dO    dS = P ∘ (dO Vᵀ - Σ_d dO_d O_d)    dQ = dS K / √D    dK = dSᵀ Q / √D

dK and dV add up over the chunks in float32.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

SCORES_BUDGET = {"cpu": 1 << 20}  # bytes of float32 scores a chunk may hold; on a CPU, what its caches do
ACCELERATOR_SCORES_BUDGET = 1 << 30
MIN_CHUNK = 16  # queries


class Packing(NamedTuple):
    """Which token sees which: `rlx_kernels.attention.attention` has the rule."""

    positions: jax.Array  # [rows, T] int32, as the two below
    segment_ids: jax.Array  # [rows, T]
    prefix_ids: jax.Array | None  # [rows, T]
    window: int | None
    max_segments: int | None


def unsupported_reason(query, key, value, packing) -> str | None:
    return None


def attention(
    query: Float[Array, "rows tokens heads width"],
    key: Float[Array, "rows tokens kv_heads width"],
    value: Float[Array, "rows tokens kv_heads width"],
    packing: Packing,
    *,
    chunk: int | None = None,
) -> Float[Array, "rows tokens heads width"]:
    """`rlx_kernels.attention.attention` of finite padding; `chunk` queries at a time, None = `default_chunk`."""
    rows, tokens, heads, _ = query.shape
    chunk = default_chunk(rows * heads * tokens, jax.default_backend()) if chunk is None else chunk
    chunks = -(-tokens // chunk)
    segments = packing.segment_ids
    prefixes = segments if packing.prefix_ids is None else packing.prefix_ids
    query, key, value, *ids = _alike(query, key, value, packing.positions, segments, prefixes)
    if chunks == 1:  # small: let autodiff keep the weights
        return _attend(packing.window, query, key, value, _Ids(*ids), _Ids(*ids))[0]
    return _attention(_Options(packing.window, chunks), query, key, value, *ids)


def default_chunk(scores_of_a_query: int, platform: str) -> int:
    """Queries of a chunk, at least 16."""
    return max(SCORES_BUDGET.get(platform, ACCELERATOR_SCORES_BUDGET) // (4 * scores_of_a_query), MIN_CHUNK)


class _Options(NamedTuple):
    window: int | None
    chunks: int


class _Ids(NamedTuple):
    positions: jax.Array  # [rows, C]
    segments: jax.Array
    prefixes: jax.Array


def seen(queries: _Ids, keys: _Ids, window: int | None) -> Bool[Array, "rows queries keys"]:
    """The rule of `attention`."""
    segments, positions = keys.segments[:, None, :], keys.positions[:, None, :]
    own = (segments == queries.segments[:, :, None]) | (segments == queries.prefixes[:, :, None])
    distance = queries.positions[:, :, None] - positions
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return own & near & (segments > 0) & (queries.segments > 0)[:, :, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, query, key, value, *ids):
    return _forward(options, query, key, value, *ids)[0]


def _forward(options, query, key, value, *ids):
    keys = _Ids(*ids)

    def of_chunk(x):
        queries, chunk_ids = x
        return _attend(options.window, queries, key, value, chunk_ids, keys)

    out, logsumexp = lax.map(of_chunk, (_split(options, query), jax.tree.map(_splitter(options), keys)))
    out = _join(out, query.shape[1])
    return out, (query, key, value, ids, out, logsumexp)


def _backward(options, kept, d_out):
    query, key, value, ids, out, logsumexp = kept
    keys = _Ids(*ids)
    # of each query, the sum that the softmax's gradient subtracts from every score's
    shared = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

    def of_chunk(carry, x):
        d_key, d_value = carry
        queries, chunk_ids, logsumexp, d_out, shared = x
        scores, allowed = _scores(options.window, queries, key, chunk_ids, keys)
        weights = jnp.where(allowed, jnp.exp(scores - logsumexp[..., None]), 0)
        d_out, shared = (_grouped(a, key) for a in (d_out, shared))
        d_weights = _product("rqkgd,rskd->rkgqs", d_out, value)
        d_scores = weights * (d_weights - jnp.moveaxis(shared, 1, 3)) * query.shape[3] ** -0.5
        d_scores = d_scores.astype(query.dtype)
        d_query = _product("rkgqs,rskd->rqkgd", d_scores, key).reshape(queries.shape)
        d_key += _product("rkgqs,rqkgd->rskd", d_scores, _grouped(queries, key))
        d_value += _product("rkgqs,rqkgd->rskd", weights.astype(value.dtype), d_out)
        return (d_key, d_value), d_query.astype(query.dtype)

    zeros = jnp.zeros(key.shape, jnp.float32)
    zeros = lax.pcast(zeros, axes, to="varying") if (axes := tuple(_varying(key))) else zeros
    split = _splitter(options)
    chunks = (split(query), jax.tree.map(split, keys), logsumexp, split(d_out), split(shared))
    (d_key, d_value), d_query = lax.scan(of_chunk, (zeros, zeros), chunks)
    return _join(d_query, query.shape[1]), d_key.astype(key.dtype), d_value.astype(value.dtype), None, None, None


_attention.defvjp(_forward, _backward)


def _attend(window, queries, key, value, query_ids, keys):
    """(output [rows, C, heads, D], log-sum-exp of the scores [rows, kv heads, heads of each, C])"""
    scores, allowed = _scores(window, queries, key, query_ids, keys)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(scores - top), 0)
    mass = weights.sum(-1, keepdims=True)
    mass = jnp.where(mass > 0, mass, 1)  # of a query that sees nothing
    weights = (weights / mass).astype(value.dtype)
    out = _product("rkgqs,rskd->rqkgd", weights, value)
    return out.reshape(queries.shape).astype(value.dtype), (top + jnp.log(mass))[..., 0]


def _scores(window, queries, key, query_ids, keys):
    """(scores [rows, kv heads, heads of each, C, T] float32, lowest where not seen; is it seen, broadcastable)."""
    scores = _product("rqkgd,rskd->rkgqs", _grouped(queries, key), key)
    allowed = seen(query_ids, keys, window)[:, None, None]
    return jnp.where(allowed, scores * key.shape[3] ** -0.5, jnp.finfo(jnp.float32).min), allowed


def _product(formula, a, b):
    """Accumulated in float32; matrix units would round float32 operands first if they were not told to keep them."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=jnp.float32)


def _grouped(x, key):
    """[rows, C, heads, ...] -> [rows, C, kv heads, heads of each, ...]"""
    rows, length, heads, *rest = x.shape
    return x.reshape(rows, length, key.shape[2], heads // key.shape[2], *rest)


def _splitter(options):
    return functools.partial(_split, options)


def _split(options, x):
    """[rows, T, ...] -> [chunks, rows, C, ...]; the padding is of segment 0."""
    rows, tokens, *rest = x.shape
    size = -(-tokens // options.chunks)
    x = jnp.pad(x, ((0, 0), (0, options.chunks * size - tokens), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, options.chunks, size, *rest), 1, 0)


def _join(x, tokens):
    chunks, rows, size, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(rows, chunks * size, *rest)[:, :tokens]


def _varying(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _alike(*arrays):
    """Inside shard_map: all varying over the axes of any of them. The transpose of that sums gradients over shards."""
    axes = frozenset().union(*(_varying(x) for x in arrays))
    missing = [tuple(axes - _varying(x)) for x in arrays]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing)]
