"""Attention in rows of one shape: a beginning of p tokens, then samples that share it, with n tokens of their own each.

The beginning sees itself, each sample sees the beginning and itself (grouped attention, arXiv 2506.05433). Scores
between two samples, which a mask of the whole row rules out, do not exist. Values and gradients are those of
`rlx.models.packed_attention`, which computes parts of n tokens in place of rows: the beginning, padded, and each
sample. The keys of a part are the beginning's p and its own n; the beginning sees its own once.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.models import packed_attention
from rlx.models.layers import Ids, visible
from rlx.types import RowShape

Sums = Float[Array, "all kv_heads q 1"]  # of all parts of all rows


def mask(shape: RowShape, ids: Ids, window: int | None) -> Bool[Array, "rows parts n seen"]:
    """Which of p + n keys a query of a part sees.

    Raises ValueError where rows cannot be cut so: a beginning is no longer than what a sample has of its own, as its
    part is padded to that, and its keys are copied for each sample.
    """
    rows, tokens = ids.segments.shape
    own = shape.own_tokens(tokens)
    if not 0 < shape.prefix <= own or shape.prefix + shape.samples * own != tokens:
        raise ValueError(
            f"rows of {tokens} tokens cannot hold a beginning of {shape.prefix} and {shape.samples} equal parts that "
            "are as long or longer"
        )
    queries, keys = (Ids(*(of(shape, x) for x in ids)) for of in (_parts, _keys))
    seen = visible(queries, keys, window)
    seen = seen.reshape(rows, -1, *seen.shape[1:])
    once = (jnp.arange(seen.shape[1]) > 0)[:, None] | (jnp.arange(seen.shape[3]) < shape.prefix)
    return seen & once[:, None]


def family_attention(
    shape: RowShape,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
) -> Float[Array, "rows t heads v"]:
    """`packed_attention` of the mask of whole rows; `allowed` is from `mask`."""
    attention = packed_attention.differentiable(partial(attend, shape), partial(pull, shape))
    return attention(query, key, value, allowed)


def attend(
    shape: RowShape,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
) -> tuple[Float[Array, "rows t heads v"], Sums]:
    """(O, L)"""
    given = _parts(shape, query), _keys(shape, key), _keys(shape, value)
    out, sums = packed_attention.attend(*given, allowed.reshape(-1, *allowed.shape[2:]))
    return _rows(shape, out), sums


def pull(
    shape: RowShape,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
    out: Float[Array, "rows t heads v"],
    sums: Sums,
    d_out: Float[Array, "rows t heads v"],
) -> tuple[Float[Array, "rows t heads d"], Float[Array, "rows t kv_heads d"], Float[Array, "rows t kv_heads v"]]:
    """(dQ, dK, dV) as `packed_attention.pull` has them."""
    given = _parts(shape, query), _keys(shape, key), _keys(shape, value)
    outs = _parts(shape, out), sums, _parts(shape, d_out)
    d_query, *d_keys = packed_attention.pull(*given, allowed.reshape(-1, *allowed.shape[2:]), *outs)

    def of_keys(d: Array) -> Array:
        """All parts see the beginning's, each sample its own."""
        shared = d[:, : shape.prefix].reshape(len(query), -1, shape.prefix, *d.shape[2:]).sum(1)
        return _rows(shape, d[:, shape.prefix :]).at[:, : shape.prefix].set(shared)

    return _rows(shape, d_query), of_keys(d_keys[0]), of_keys(d_keys[1])


def _parts(shape: RowShape, x: Array) -> Array:
    """[rows * parts, n, ...] of [rows, t, ...]: the beginning with 0 behind it, then the samples."""
    length = shape.own_tokens(x.shape[1])
    padding = [(0, 0), (0, length - shape.prefix), *((0, 0),) * (x.ndim - 2)]
    beginning = jnp.pad(x[:, : shape.prefix], padding)
    return jnp.concatenate([beginning, x[:, shape.prefix :]], axis=1).reshape(-1, length, *x.shape[2:])


def _keys(shape: RowShape, x: Array) -> Array:
    """[rows * parts, p + n, ...]: the beginning before each part."""
    shared = jnp.repeat(x[:, : shape.prefix], shape.samples + 1, axis=0)
    return jnp.concatenate([shared, _parts(shape, x)], axis=1)


def _rows(shape: RowShape, parts: Array) -> Array:
    """What `_parts` cut, together again."""
    length = parts.shape[1]
    whole = parts.reshape(-1, (shape.samples + 1) * length, *parts.shape[2:])
    return jnp.concatenate([whole[:, : shape.prefix], whole[:, length:]], axis=1)
