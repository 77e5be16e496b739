"""The grouped product in plain XLA: a loop over blocks of rows, each with the matrix of its group.

`jax.lax.ragged_dot` becomes, on a CPU and by default on a GPU, one masked product of every row with every matrix: E
times the work and E·T·D held, forwards and twice backwards. Here the rows of a group are cut into blocks of a fixed
size, so the work is that of the rows plus at most one block a group, and nothing is held beside the result. A group's
last block reads on into the next group; what it writes there is overwritten when that group's turn comes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

MIN_BLOCK, MAX_BLOCK = 32, 512  # rows
BLOCKS_PER_GROUP = 2  # of the mean group: half a block a group is wasted on average


def grouped_matmul(
    x: Float[Array, "rows width"],
    weights: Float[Array, "groups width out"],
    group_sizes: Integer[Array, " groups"],
    *,
    block: int | None = None,
) -> Float[Array, "rows out"]:
    """`rlx_kernels.grouped_matmul`; `block` rows at a time, None = `default_block`."""
    block = default_block(x.shape[0], weights.shape[0]) if block is None else block
    return _grouped(block, *_alike(x, weights, bounded(group_sizes, x.shape[0])))


def bounded(group_sizes: Integer[Array, " groups"], rows: int) -> Integer[Array, " groups"]:
    """int32 sizes of at least 0 that add up to at most `rows`: what lies beyond is cut off."""
    most = min(rows, jnp.iinfo(group_sizes.dtype).max)
    ends = jnp.minimum(jnp.cumsum(jnp.clip(group_sizes, 0, most).astype(jnp.int32)), rows)
    return jnp.diff(ends, prepend=0)


def default_block(rows: int, groups: int) -> int:
    """A power of two."""
    wanted = max(rows // (groups * BLOCKS_PER_GROUP), 1)
    return min(max(1 << (wanted.bit_length() - 1), MIN_BLOCK), MAX_BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(block, x, weights, group_sizes):
    return _loop(block, x, weights, group_sizes)


def _forward(block, x, weights, group_sizes):
    return _grouped(block, x, weights, group_sizes), (x, weights, group_sizes)


def _backward(block, kept, d_out):
    x, weights, group_sizes = kept
    d_x = _loop(block, d_out, weights.swapaxes(1, 2), group_sizes)
    return d_x, _loop_d_weights(block, x, d_out, weights, group_sizes), None


_grouped.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    total: jax.Array  # of all groups
    ends: jax.Array  # [E] blocks of this group and those before it
    rows: jax.Array  # [E] rows of the groups before this one
    row_ends: jax.Array  # [E]


def _cut(block, sizes):
    blocks = -(-sizes // block)
    ends, row_ends = jnp.cumsum(blocks), jnp.cumsum(sizes)
    return _Blocks(ends[-1], ends, row_ends - sizes, row_ends)


def _place(block, cut, i):
    """(group, first row, which rows are the group's own) of block i."""
    group = (cut.ends <= i).sum(dtype=jnp.int32)
    blocks_before = jnp.where(group > 0, cut.ends[group - 1], 0)
    row = cut.rows[group] + (i - blocks_before) * block
    return group, row, (row + jnp.arange(block) < cut.row_ends[group])[:, None]


def _loop(block, x, weights, group_sizes):
    cut = _cut(block, group_sizes)
    padded = jnp.pad(x, ((0, block), (0, 0)))  # the last block may reach beyond

    def body(i, out):
        group, row, own = _place(block, cut, i)
        product = _dot(lax.dynamic_slice_in_dim(padded, row, block), weights[group], 1, 0)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, 0).astype(x.dtype), row, 0)

    zeros = jnp.zeros((x.shape[0] + block, weights.shape[2]), x.dtype)
    return lax.fori_loop(0, cut.total, body, _varying_as(zeros, x))[: x.shape[0]]


def _loop_d_weights(block, x, d_out, weights, group_sizes):
    cut = _cut(block, group_sizes)
    padded, d_padded = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, d_out))

    def body(i, total):
        group, row, own = _place(block, cut, i)
        # both: a 0 in one does not remove a NaN of the other
        rows, d_rows = (jnp.where(own, lax.dynamic_slice_in_dim(a, row, block), 0) for a in (padded, d_padded))
        d_matrix = _dot(rows, d_rows, 0, 0)
        return lax.dynamic_update_index_in_dim(total, total[group] + d_matrix, group, 0)

    zeros = jnp.zeros(weights.shape, jnp.promote_types(x.dtype, jnp.float32))
    return lax.fori_loop(0, cut.total, body, _varying_as(zeros, x)).astype(weights.dtype)


def _dot(a, b, a_axis, b_axis):
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, dimensions, precision=precision(a.dtype), preferred_element_type=wide)


def precision(dtype) -> lax.Precision | None:
    """Matrix units would round float32 operands first if they were not told to keep them."""
    return None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST


def _varying_as(x, like):
    missing = tuple(jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def _alike(*arrays):
    """Inside shard_map: all varying over the axes of any of them. The transpose of that sums gradients over shards."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    missing = [tuple(axes - jax.typeof(x).manual_axis_type.varying) for x in arrays]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing)]
