"""Attention in rows whose parts lie at fixed places: a beginning, and the own tokens of the samples that share it.

The beginning sees itself, each sample sees the beginning and itself (grouped attention, arXiv 2506.05433). Scores
between two samples, which a mask of the whole row rules out, do not exist. Values and gradients are those of
`rlx.models.packed_attention`, which computes parts of n tokens in place of rows: a sample each and, padded, what the
beginning is cut into. The keys of a part are the beginning's p and its own n; those of the beginning count once.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.models import packed_attention
from rlx.models.layers import Ids, visible
from rlx.types import RowPlaces

Sums = Float[Array, "all kv_heads q 1"]  # of all parts of all rows


def mask(places: RowPlaces, ids: Ids, window: int | None) -> Bool[Array, "rows parts n seen"]:
    """Which of p + n keys a query of a part sees. Raises ValueError where the rows cannot be cut so."""
    rows, tokens = ids.segments.shape
    if not 0 < places.prefix < tokens or (tokens - places.prefix) % places.samples:
        raise ValueError(
            f"rows of {tokens} tokens cannot have a beginning of {places.prefix} and {places.samples} equal parts"
        )
    queries, keys = (Ids(*(of(places, x) for x in ids)) for of in (_parts, _keys))
    seen = visible(queries, keys, window)
    seen = seen.reshape(rows, -1, *seen.shape[1:])
    sample = jnp.arange(seen.shape[1]) >= seen.shape[1] - places.samples
    once = sample[:, None] | (jnp.arange(seen.shape[3]) < places.prefix)
    return seen & once[:, None]


def family_attention(
    places: RowPlaces,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
) -> Float[Array, "rows t heads v"]:
    """`packed_attention` of the mask of whole rows; `allowed` is from `mask`."""
    return packed_attention.differentiable(partial(attend, places), partial(pull, places))(query, key, value, allowed)


def attend(
    places: RowPlaces,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
) -> tuple[Float[Array, "rows t heads v"], Sums]:
    """(O, L)"""
    given = _parts(places, query), _keys(places, key), _keys(places, value)
    out, sums = packed_attention.attend(*given, allowed.reshape(-1, *allowed.shape[2:]))
    return _rows(places, out, query.shape[1]), sums


def pull(
    places: RowPlaces,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows parts n seen"],
    out: Float[Array, "rows t heads v"],
    sums: Sums,
    d_out: Float[Array, "rows t heads v"],
) -> tuple[Float[Array, "rows t heads d"], Float[Array, "rows t kv_heads d"], Float[Array, "rows t kv_heads v"]]:
    """(dQ, dK, dV) as `packed_attention.pull` has them."""
    rows, tokens = query.shape[:2]
    given = _parts(places, query), _keys(places, key), _keys(places, value)
    outs = _parts(places, out), sums, _parts(places, d_out)
    d_query, *d_keys = packed_attention.pull(*given, allowed.reshape(-1, *allowed.shape[2:]), *outs)

    def of_keys(d: Array) -> Array:
        """All parts see the beginning's, each sample its own."""
        shared = d[:, : places.prefix].reshape(rows, -1, places.prefix, *d.shape[2:]).sum(1)
        return _rows(places, d[:, places.prefix :], tokens).at[:, : places.prefix].set(shared)

    return _rows(places, d_query, tokens), of_keys(d_keys[0]), of_keys(d_keys[1])


def _parts(places: RowPlaces, x: Array) -> Array:
    """[rows * parts, n, ...] of [rows, t, ...]: the beginning's with 0 behind it, then the samples'."""
    length = places.own_tokens(x.shape[1])
    padding = [(0, 0), (0, -places.prefix % length), *((0, 0),) * (x.ndim - 2)]
    beginning = jnp.pad(x[:, : places.prefix], padding)
    return jnp.concatenate([beginning, x[:, places.prefix :]], axis=1).reshape(-1, length, *x.shape[2:])


def _keys(places: RowPlaces, x: Array) -> Array:
    """[rows * parts, p + n, ...]: the beginning's before those of each part."""
    parts = _parts(places, x)
    shared = jnp.repeat(x[:, : places.prefix], len(parts) // len(x), axis=0)
    return jnp.concatenate([shared, parts], axis=1)


def _rows(places: RowPlaces, parts: Array, tokens: int) -> Array:
    """What `_parts` cut, together again."""
    own = tokens - places.prefix
    length = own + places.prefix + -places.prefix % parts.shape[1]
    whole = parts.reshape(-1, length, *parts.shape[2:])
    return jnp.concatenate([whole[:, : places.prefix], whole[:, length - own :]], axis=1)
