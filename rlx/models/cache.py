"""The cache of a layer: how it lies in memory, what is written to it, and attention of one token over it.

A row's context is cut into stretches, arrays of their own: a step reads the stretches that hold something and touches
no other, where a slice of one long array would be copied at every token. Keys are [rows, kv_heads, d, s], values
[rows, kv_heads, s, d]: both products of a step run over memory as it lies (on a CPU, 64 rows of 96 positions: 0.4 ms
a layer, against 5 ms for [rows, s, kv_heads, d], which is transposed first).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Stretches = tuple[Array, ...]  # in the order of the positions


class LayerCache(NamedTuple):
    """What a mixer keeps of the tokens before the next one, of every row."""

    growing: tuple[Any, ...]  # entries for every position: Stretches each; of prefilled rows, one array each
    state: tuple[Array, ...]  # of one size however long the row; as after all tokens but the row's last

    def first(self, stretches: int) -> LayerCache:
        return self._replace(growing=tuple(kept[:stretches] for kept in self.growing))

    def rest_of(self, whole: LayerCache) -> LayerCache:
        """With the stretches of `whole` behind those that it has."""
        pairs = zip(self.growing, whole.growing, strict=True)
        return self._replace(growing=tuple((*kept, *every[len(kept) :]) for kept, every in pairs))

    def filled(self, new: LayerCache, axes: tuple[int, ...], source: Int[Array, " rows"]) -> LayerCache:
        """With row `source[r]` of `new` in row r; where `source` is negative nothing changes.

        axes: of the positions in the arrays of `growing`.
        """
        growing = zip(self.growing, new.growing, axes, strict=True)
        states = zip(self.state, new.state, strict=True)
        return LayerCache(
            tuple(filled(old, rows, axis, source) for old, rows, axis in growing),
            tuple(_taken(source, rows[source], old) for old, rows in states),
        )


def empty_keys(rows: int, ends: tuple[int, ...], kv_heads: int, dim: int, dtype: jnp.dtype) -> Stretches:
    """Stretches that end before the positions `ends`."""
    return tuple(jnp.zeros((rows, kv_heads, dim, size), dtype) for size in sizes(ends))


def empty_values(rows: int, ends: tuple[int, ...], kv_heads: int, dim: int, dtype: jnp.dtype) -> Stretches:
    return tuple(jnp.zeros((rows, kv_heads, size, dim), dtype) for size in sizes(ends))


def sizes(ends: tuple[int, ...]) -> list[int]:
    """Positions in each stretch."""
    return [end - start for start, end in itertools.pairwise((0, *ends))]


def as_keys(key: Float[Array, "rows s kv_heads d"]) -> Float[Array, "rows kv_heads d s"]:
    return key.transpose(0, 2, 3, 1)


def as_values(value: Float[Array, "rows s kv_heads d"]) -> Float[Array, "rows kv_heads s d"]:
    return value.transpose(0, 2, 1, 3)


def filled(old: Stretches, new: Array, axis: int, source: Int[Array, " rows"]) -> Stretches:
    """`old` with row `source[r]` of `new` at the beginning of row r; where `source` is negative nothing changes.

    `new` is one array, of positions from 0 to the end of a stretch, which are on `axis`.
    """
    stretches, start = list(old), 0
    for i, stretch in enumerate(old):
        if start == new.shape[axis]:
            break
        part = jax.lax.slice_in_dim(new, start, start + stretch.shape[axis], axis=axis)
        stretches[i] = _taken(source, part[source], stretch)
        start += stretch.shape[axis]
    return tuple(stretches)


def _taken(source: Int[Array, " rows"], new: Array, old: Array) -> Array:
    """`new` where a row has a source; a scatter of rows is 8 times slower on a CPU."""
    return jnp.where((source >= 0).reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def attend(
    query: Float[Array, "rows heads d"],
    key: Float[Array, "rows kv_heads d"],
    value: Float[Array, "rows kv_heads d"],
    keys: Stretches,
    values: Stretches,
    position: Int[Array, " rows"],
    *,
    window: int | None = None,
) -> tuple[Float[Array, "rows heads d"], Stretches, Stretches]:
    """Grouped-query attention of one token a row at `position` over itself and what the cache holds before it, of the
    last `window` positions where there is one.

    Returns the cache with `key` and `value` written at `position`, unless that is past its end.
    """
    rows, heads, dim = query.shape
    row = jnp.arange(rows)
    grouped = query.reshape(rows, key.shape[1], -1, dim)
    new_keys, new_values, scores, start = [], [], [], 0
    for old_keys, old_values in zip(keys, values, strict=True):
        end = start + old_keys.shape[3]
        at = _within(position, start, end)
        new_keys.append(old_keys.at[row, :, :, at].set(key, mode="drop"))
        new_values.append(old_values.at[row, :, at].set(value, mode="drop"))
        visible = _visible(position, start, end, window)
        scores.append(_scores(grouped, new_keys[-1], visible))
        start = end
    weights, total = _softmax(scores)
    mixed = sum(jnp.einsum("rkgs,rksd->rkgd", w.astype(v.dtype), v) for w, v in zip(weights, new_values, strict=True))
    return (mixed / total).astype(query.dtype).reshape(rows, heads, dim), tuple(new_keys), tuple(new_values)


def attend_latents(
    query: Float[Array, "rows heads c"],
    made: Float[Array, "rows c"],
    held: Stretches,
    position: Int[Array, " rows"],
) -> tuple[Float[Array, "rows heads c"], Stretches]:
    """`attend` where what is cached [rows, s, c] is both the key and the value of all heads; scores are not scaled."""
    row, stretches, scores, start = jnp.arange(len(query)), [], [], 0
    for old in held:
        end = start + old.shape[1]
        new = old.at[row, _within(position, start, end)].set(made, mode="drop")
        products = jnp.einsum("rhc,rsc->rhs", query, new, preferred_element_type=jnp.float32)
        visible = _visible(position, start, end, None)
        scores.append(jnp.where(visible[:, None], products, jnp.finfo(jnp.float32).min))
        stretches.append(new)
        start = end
    weights, total = _softmax(scores)
    mixed = sum(jnp.einsum("rhs,rsc->rhc", w.astype(x.dtype), x) for w, x in zip(weights, stretches, strict=True))
    return (mixed / total).astype(query.dtype), tuple(stretches)


def _within(position: Int[Array, " rows"], start: int, end: int) -> Int[Array, " rows"]:
    """Where in the stretch [start, end) a position is; out of its bounds where it is in another."""
    return jnp.where(position < start, end, position) - start


def _visible(position: Int[Array, " rows"], start: int, end: int, window: int | None) -> Bool[Array, "rows s"]:
    at = jnp.arange(start, end)
    seen = at <= position[:, None]
    return seen if window is None else seen & (position[:, None] - at < window)


def _softmax(scores: list[Array]) -> tuple[list[Array], Array]:
    """(weights of each stretch, not yet normalised; their sum with a last axis of 1)."""
    largest = jnp.stack([s.max(axis=-1) for s in scores]).max(axis=0)[..., None]
    weights = [jnp.exp(s - largest) for s in scores]
    return weights, jnp.stack([w.sum(axis=-1) for w in weights]).sum(axis=0)[..., None]


def _scores(
    grouped: Float[Array, "rows kv_heads group d"],
    keys: Float[Array, "rows kv_heads d s"],
    visible: Bool[Array, "rows s"],
) -> Float[Array, "rows kv_heads group s"]:
    products = jnp.einsum("rkgd,rkds->rkgs", grouped, keys, preferred_element_type=jnp.float32)
    lowest = jnp.finfo(jnp.float32).min
    return jnp.where(visible[:, None, None], products * grouped.shape[-1] ** -0.5, lowest)
