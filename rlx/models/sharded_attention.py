"""Attention within rows on a mesh: rows over dp, queries over cp, heads over tp; keys and values are gathered over cp,
or go round in a ring.

Written by hand, as XLA's partitioner would gather the queries too: in the layout that the products run over, heads and
tokens are one axis, which cannot be cut by both. A device holds scores of its own queries and heads alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from rlx.models import blockwise, family_attention, packed_attention, ring_attention
from rlx.models.blockwise import Blocks
from rlx.models.layers import Ids
from rlx.models.packed_attention import differentiable
from rlx.models.rows import Rows
from rlx.parallel.expert import TOKENS
from rlx.parallel.mesh import Placement
from rlx.types import RowShape

HEADS = PartitionSpec("dp", "cp", "tp")  # [rows, t, heads, d]
SHARED = PartitionSpec("dp", "cp")  # the same, the heads whole
OWN = PartitionSpec("dp", "cp")  # of this device's tokens: [rows, t], a mask's [rows, t, s]
ALL = PartitionSpec("dp")  # of all tokens
SUMS = PartitionSpec("dp", "tp", "cp")  # [rows, kv_heads, heads of each · t, 1], read by the same device only


class Local(NamedTuple):
    """What one device does, with its queries and their heads, and the keys of its tokens."""

    attend: Callable[..., tuple[Array, Array]]  # (query, key, value, *who sees whom) -> (O, L)
    pull: Callable[..., tuple[Array, Array, Array]]  # (query, key, value, *the same, O, L, dO) -> (dQ, dK, dV)
    seen: tuple[PartitionSpec, ...]  # where what says who sees whom lies
    sums: PartitionSpec  # where L lies


def row_attention(
    rows: Rows,
    window: int,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
) -> Float[Array, "rows t heads v"]:
    """`packed_attention` under the window number `window` of `rows`, by the devices that share them."""
    placement, given = rows.placement, (query, key, value)
    if rows.row_shape is not None:
        if placement is None:
            return family_attention.family_attention(rows.row_shape, *given, rows.masks[window])
        return sharded(placement, in_families(rows.row_shape), *given, rows.masks[window])
    if not rows.block:
        allowed = rows.masks[window]
        if placement is None:
            return packed_attention.packed_attention(*given, allowed)
        return sharded(placement, WHOLE, *given, allowed)
    ids = Ids(rows.positions, rows.segment_ids, rows.prefix_ids)
    blocks = Blocks(rows.block, rows.windows[window])
    if placement is None:
        return blockwise.blockwise_attention(blocks, *given, ids)
    if placement.ring:
        return sharded(placement, in_ring(blocks, placement.layout.cp), *given, ids)
    return sharded(placement, in_blocks(blocks), *given, ids, ids)


def sharded(
    placement: Placement,
    local: Local,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    *seen: PyTree[Array],
) -> Float[Array, "rows t heads v"]:
    """`local` on every device. Key-value heads that TP does not divide are held whole."""
    tp, kv_heads = placement.layout.tp, key.shape[2]
    shared = kv_heads % tp != 0
    keys = SHARED if shared else HEADS
    mesh = None if placement.inside else placement.mesh
    over_devices = partial(jax.shard_map, mesh=mesh, axis_names=set(TOKENS), check_vma=False)

    def own(x: Array) -> Array:
        """The key-value heads that this device's queries read."""
        if not shared:
            return x
        # TP is a multiple of their number: one
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tp") * kv_heads // tp, 1, 2)

    def returned(d: Array) -> Array:
        """The gradient of what `own` was given."""
        if not shared:
            return d
        whole = jnp.zeros((*d.shape[:2], kv_heads, d.shape[3]), d.dtype)
        place = jax.lax.axis_index("tp") * kv_heads // tp
        return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(whole, d, place, 2), "tp")

    def attend(query: Array, key: Array, value: Array, *rest: PyTree[Array]) -> tuple[Array, Array]:
        return local.attend(query, own(key), own(value), *rest)

    def pull(query: Array, key: Array, value: Array, *rest: PyTree[Array]) -> tuple[Array, Array, Array]:
        d_query, d_key, d_value = local.pull(query, own(key), own(value), *rest)
        return d_query, returned(d_key), returned(d_value)

    given = (HEADS, keys, keys, *local.seen)
    # Its own backward pass: jax cannot lower the one that it derives from a `shard_map` in a pipeline's.
    return differentiable(
        over_devices(attend, in_specs=given, out_specs=(HEADS, local.sums)),
        over_devices(pull, in_specs=(*given, HEADS, local.sums, HEADS), out_specs=given[:3]),
    )(query, key, value, *seen)


def in_blocks(blocks: Blocks) -> Local:
    """Scores a block at a time, keys and values gathered; (queries, keys) say who sees whom."""

    def attend(query: Array, key: Array, value: Array, queries: Ids, keys: Ids) -> tuple[Array, Array]:
        made = blockwise.attend(blocks, query, _all(key), _all(value), queries, keys)
        return blockwise.settled(queries, value, made)

    def pull(query: Array, key: Array, value: Array, *rest: PyTree[Array]) -> tuple[Array, Array, Array]:
        d_query, d_key, d_value = blockwise.pull(blocks, query, _all(key), _all(value), *rest)
        return d_query, _mine(d_key), _mine(d_value)

    return Local(attend, pull, (OWN, ALL), HEADS)


def in_ring(blocks: Blocks, ranks: int) -> Local:
    """The same without gathering; one `Ids` says who sees whom."""

    def attend(query: Array, key: Array, value: Array, ids: Ids) -> tuple[Array, Array]:
        return blockwise.settled(ids, value, ring_attention.attend(blocks, ranks, query, key, value, ids))

    return Local(attend, partial(ring_attention.pull, blocks, ranks), (OWN,), HEADS)


def in_families(row_shape: RowShape) -> Local:
    """Rows whose parts have places, each whole on one device; `family_attention.mask` says who sees whom."""
    return Local(partial(family_attention.attend, row_shape), partial(family_attention.pull, row_shape), (ALL,), SUMS)


def _attend_whole(query: Array, key: Array, value: Array, allowed: Array) -> tuple[Array, Array]:
    return packed_attention.attend(query, _all(key), _all(value), allowed)


def _pull_whole(query: Array, key: Array, value: Array, *rest: Array) -> tuple[Array, Array, Array]:
    d_query, d_key, d_value = packed_attention.pull(query, _all(key), _all(value), *rest)
    return d_query, _mine(d_key), _mine(d_value)


WHOLE = Local(_attend_whole, _pull_whole, (OWN,), SUMS)  # a mask [rows, t, s] says who sees whom


def _all(x: Array) -> Array:
    """All tokens of keys or values."""
    return jax.lax.all_gather(x, "cp", axis=1, tiled=True)


def _mine(d: Array) -> Array:
    """The gradient of what `_all` was given, from the queries of all ranks: `d` is float32, rounded after the sum."""
    return jax.lax.psum_scatter(d, "cp", scatter_dimension=1, tiled=True)
