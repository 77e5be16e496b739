"""Sequence parallelism: between the products that TP cuts, a device of a tp group holds its own part of the tokens.

Megatron's (arXiv 2205.05198, section 4.2.2). TP alone sums a row-parallel product over tp and leaves the whole of it,
and what is added, normed and kept for the backward pass, with every device. Here the sum is scattered over the tokens,
and they are gathered before the next column-parallel product; backward the two change places. A device sends as many
bytes as for the sum, and holds 1 / TP of the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rlx.parallel.expert import TOKENS
from rlx.parallel.mesh import Placement

GROUP = ("dp", "cp")  # [rows, t, d], the tokens of a tp group
OWN = ("dp", ("cp", "tp"))


def gathered(placement: Placement | None, x: Float[Array, "rows t d"]) -> Float[Array, "rows t d"]:
    """What a column-parallel product reads: the tokens of the whole tp group."""
    if placement is None or not placement.over_tp:
        return x
    group, own = placement.lying(*GROUP), placement.lying(*OWN)
    return _moved(group, lambda d: own(group(d)))(x)


def scattered(placement: Placement | None, y: Float[Array, "rows t d"]) -> Float[Array, "rows t d"]:
    """What a row-parallel product made, each device's own tokens of it."""
    if placement is None or not placement.over_tp:
        return y
    group, own = placement.lying(*GROUP), placement.lying(*OWN)
    return _moved(lambda y: own(group(y)), group)(y)


def _moved(there: Callable[[Array], Array], back: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A constraint whose gradient has another one: that of a constraint alone has the same."""
    move = jax.custom_vjp(lambda x: there(x))
    move.defvjp(lambda x: (there(x), None), lambda _, d: (back(d),))
    return move


def embedded(
    placement: Placement, table: Float[Array, "vocab d"], tokens: Int[Array, "rows t"]
) -> Float[Array, "rows t d"]:
    """Rows of a table whose vocabulary is cut over tp: each device looks up those that it has, for the tokens of its
    tp group, and the sum is scattered over these."""

    def local(table: Array, tokens: Array) -> Array:
        own = tokens - jax.lax.axis_index("tp") * len(table)
        here = (own >= 0) & (own < len(table))
        found = jnp.where(here[..., None], table[jnp.where(here, own, 0)], 0)
        return jax.lax.psum_scatter(found, "tp", scatter_dimension=1, tiled=True)

    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(PartitionSpec("tp"), PartitionSpec(*GROUP)),
        out_specs=PartitionSpec(*OWN),
        axis_names=set(TOKENS),
        check_vma=False,
    )(table, tokens)
