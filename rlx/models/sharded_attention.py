"""`packed_attention` on a mesh: rows over dp, queries over cp, heads over tp; keys and values are gathered over cp.

Written by hand, as XLA's partitioner would gather the queries too: in the layout that the products run over, heads and
tokens are one axis, which cannot be cut by both. A device holds scores of its own queries and heads alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from rlx.models.layers import KEPT
from rlx.models.packed_attention import attend, packed_attention, pull, stacked
from rlx.models.rows import Rows
from rlx.parallel.expert import TOKENS
from rlx.parallel.mesh import Placement

HEADS = PartitionSpec("dp", "cp", "tp")  # [rows, t, heads, d]
SHARED = PartitionSpec("dp", "cp")  # the same, the heads whole
MASK = PartitionSpec("dp", "cp")  # [rows, t, s]
SUMS = PartitionSpec("dp", "tp", "cp")  # [rows, kv_heads, heads of each · t, 1], read by the same device only


def row_attention(
    rows: Rows,
    window: int,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
) -> Float[Array, "rows t heads v"]:
    """`packed_attention` over the mask number `window` of `rows`, by the devices that share them."""
    allowed = rows.masks[window]
    if rows.placement is None:
        return packed_attention(query, key, value, allowed)
    return sharded_attention(rows.placement, query, key, value, allowed)


def sharded_attention(
    placement: Placement,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    allowed: Bool[Array, "rows t t"],
) -> Float[Array, "rows t heads v"]:
    """`rlx.models.packed_attention.packed_attention`. Key-value heads that TP does not divide are held whole."""
    tp, kv_heads = placement.layout.tp, key.shape[2]
    shared = kv_heads % tp != 0
    keys = SHARED if shared else HEADS
    mesh = None if placement.inside else placement.mesh
    over_devices = partial(jax.shard_map, mesh=mesh, axis_names=set(TOKENS), check_vma=False)

    def own(x: Array) -> Array:
        """All tokens of the key-value heads that this device's queries read."""
        if shared:  # TP is a multiple of their number: one
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tp") * kv_heads // tp, 1, 2)
        return jax.lax.all_gather(x, "cp", axis=1, tiled=True)

    def returned(d: Array) -> Array:
        """The gradient of what `own` was given."""
        d = jax.lax.psum_scatter(d, "cp", scatter_dimension=1, tiled=True)
        if not shared:
            return d
        whole = jnp.zeros((*d.shape[:2], kv_heads, d.shape[3]), d.dtype)
        place = jax.lax.axis_index("tp") * kv_heads // tp
        return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(whole, d, place, 2), "tp")

    def below(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        key, value = own(key), own(value)
        return stacked(query, key.shape[2]), stacked(key, key.shape[2]), stacked(value, key.shape[2])

    def local(query: Array, key: Array, value: Array, allowed: Array) -> tuple[Array, Array]:
        return attend(*below(query, key, value), allowed)

    def local_pull(query: Array, key: Array, value: Array, allowed: Array, *rest: Array) -> tuple[Array, ...]:
        *kept, d_out = rest
        d_query, d_key, d_value = pull((*below(query, key, value), allowed, *kept), d_out)
        return d_query, returned(d_key), returned(d_value)

    given = (HEADS, keys, keys, MASK)

    def forward(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        made = over_devices(local, in_specs=given, out_specs=(HEADS, SUMS))(*inputs)
        out, sums = checkpoint_name(made, KEPT)
        return out, (*inputs, out, sums)

    def backward(kept: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array, None]:
        specs = (*given, HEADS, SUMS, HEADS)
        return *over_devices(local_pull, in_specs=specs, out_specs=given[:3])(*kept, d_out), None

    # Its own backward pass: jax cannot lower the one that it derives from a `shard_map` in a pipeline's.
    attention = jax.custom_vjp(lambda *inputs: forward(*inputs)[0])
    attention.defvjp(forward, backward)
    return attention(query, key, value, allowed)
