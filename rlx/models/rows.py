"""What every layer needs to know of the tokens it sees, made once for all layers."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from rlx.models import family_attention, rope
from rlx.models.blockwise import block_size
from rlx.models.description import Architecture
from rlx.models.layers import Ids, visible
from rlx.parallel.mesh import Placement
from rlx.types import RowShape


@struct.dataclass
class Rows:
    """Packed rows. A recurrent layer starts anew where the segment changes and is left unchanged by padding."""

    positions: Array  # int32 [rows, t], of each token in its own sequence
    segment_ids: Array  # int32 [rows, t], 0 = padding
    prefix_ids: Array  # int32 [rows, t], 0 = none
    tables: tuple[rope.Tables, ...]  # of `Architecture.ropes`
    # Of `windows`, bool [rows, t, t], or as `family_attention.mask` makes them; none where attention goes by blocks.
    masks: tuple[Array, ...]
    windows: tuple[int | None, ...] = struct.field(pytree_node=False)  # of attention layers
    block: int = struct.field(pytree_node=False, default=0)  # tokens: `rlx.models.blockwise.block_size`
    row_shape: RowShape | None = struct.field(pytree_node=False, default=None)  # None = anywhere
    placement: Placement | None = struct.field(pytree_node=False, default=None)  # devices that share them, None = one


class Token(NamedTuple):
    """One token a row, as decoding sees it."""

    positions: Array  # int32 [rows]
    tables: tuple[rope.Tables, ...]  # [rows, 1, half]


def packed_rows(
    arch: Architecture,
    positions: Int[Array, "rows t"],
    segment_ids: Int[Array, "rows t"],
    prefix_ids: Int[Array, "rows t"] | None = None,
    placement: Placement | None = None,
    attention_block: int = 0,
    row_shape: RowShape | None = None,
) -> Rows:
    """attention_block: the most tokens whose attention scores exist at once, 0 = all of a row's.
    row_shape: of the parts of a row, whose scores exist whole; None = anywhere.

    Raises ValueError for rows that cannot be cut so, and where devices share such a row.
    """
    ids = Ids(positions, segment_ids, jnp.zeros_like(segment_ids) if prefix_ids is None else prefix_ids)
    if placement is not None:
        ids = Ids(*(placement.rows(x) for x in ids))
    ring = placement is not None and placement.ring
    ranks = 1 if placement is None else placement.layout.cp
    if row_shape is not None and ranks > 1:
        raise ValueError(f"CP{ranks} cuts rows, whose parts lie at fixed places: set learner.row_samples to 0")
    block = 0 if row_shape else block_size(attention_block, positions.shape[1], ranks, always=ring)
    seen = (lambda window: family_attention.mask(row_shape, ids, window)) if row_shape else partial(visible, ids, ids)
    masks = () if block else tuple(seen(window) for window in arch.windows)
    if placement is not None:
        masks = tuple(placement.rows(mask) for mask in masks)
    tables = tuple(rope.tables(r, ids.positions) for r in arch.ropes)
    return Rows(
        positions=ids.positions,
        segment_ids=ids.segments,
        prefix_ids=ids.prefixes,
        tables=tables,
        masks=masks,
        windows=arch.windows,
        block=block,
        row_shape=row_shape,
        placement=placement,
    )


def token_rows(arch: Architecture, positions: Int[Array, " rows"]) -> Token:
    return Token(positions, tuple(rope.tables(r, positions[:, None]) for r in arch.ropes))
