"""What the layers that carry something from token to token share: where a row begins anew, and what they return."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Integer


class Recurrent(NamedTuple):
    output: jax.Array
    state: jax.Array  # after the last valid token of each row


class Runs(NamedTuple):
    """Runs of tokens of one segment, counted along each row."""

    ordinal: Int[Array, "rows tokens"]  # 0: goes on from what came before the row; padding has that of what precedes it
    valid: Bool[Array, "rows tokens"]


def runs(segment_ids: Integer[Array, "rows tokens"]) -> Runs:
    valid = segment_ids > 0
    begins = (segment_ids[:, 1:] != segment_ids[:, :-1]) & valid[:, 1:]
    ordinal = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    return Runs(jnp.pad(ordinal, ((0, 0), (1, 0))), valid)


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """Inside shard_map: all varying over the axes of any of them. The transpose of that sums gradients over shards."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    missing = [tuple(axes - v) for v in varying]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing)]
