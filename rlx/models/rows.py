"""What every layer needs to know of the tokens it sees, made once for all layers."""

from __future__ import annotations

from typing import NamedTuple

from flax import struct
from jaxtyping import Array, Int

from rlx.models import rope
from rlx.models.description import Architecture
from rlx.models.layers import packed_causal_mask
from rlx.parallel.mesh import Placement


@struct.dataclass
class Rows:
    """Packed rows. A recurrent layer starts anew where the segment changes and is left unchanged by padding."""

    positions: Array  # int32 [rows, t], of each token in its own sequence
    segment_ids: Array  # int32 [rows, t], 0 = padding
    tables: tuple[rope.Tables, ...]  # of `Architecture.ropes`
    masks: tuple[Array, ...]  # bool [rows, t, t], of `Architecture.windows`
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
) -> Rows:
    if placement is not None:
        positions, segment_ids = placement.rows(positions), placement.rows(segment_ids)
    allowed = packed_causal_mask(positions, segment_ids, prefix_ids)
    distance = positions[:, :, None] - positions[:, None, :]
    masks = tuple(allowed if window is None else allowed & (distance < window) for window in arch.windows)
    if placement is not None:
        masks = tuple(placement.rows(mask) for mask in masks)
    return Rows(positions, segment_ids, tuple(rope.tables(r, positions) for r in arch.ropes), masks, placement)


def token_rows(arch: Architecture, positions: Int[Array, " rows"]) -> Token:
    return Token(positions, tuple(rope.tables(r, positions[:, None]) for r in arch.ropes))
