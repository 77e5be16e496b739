"""Experts spread over devices: tokens go to their experts and come back, in blocks of a fixed size (all-to-all).

Every device holds `experts / EP` experts whole, and a share of the tokens. It sorts what its tokens want by the device
that has the expert, sends each device a block of `capacity` rows, computes what it was sent, and sends it back. A block
that cannot hold all rows drops the last ones, which then get no expert's output; at the default capacity that cannot
happen. Blocks of one size because exchanges of uneven ones are not there on every backend. Layout: GShard (arXiv
2006.16668), without its capacity limit by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from rlx.parallel.layout import AXES
from rlx.parallel.mesh import Placement
from rlx.parallel.rules import axes_of

# (local experts' parameters, rows sorted by expert, rows of each local expert) -> rows
Compute = Callable[[PyTree[Array], Array, Array], Array]
# Tokens are cut over all axes but the stages', each of which has its own layers: rows over dp, a row's over the rest.
TOKENS = tuple(axis for axis in AXES if axis != "pp")


class Sent(NamedTuple):
    """Where each of a device's n · k wishes lies in what it sends."""

    device: Array  # int32 [n k], EP where it is not sent
    place: Array  # int32 [n k], in the block of that device


def capacity(wishes: int, devices: int, tokens: int, top_k: int, local_experts: int, share: float) -> int:
    """Rows of a block: `share` of what one device could at most want of another."""
    most = tokens * min(top_k, local_experts) if devices > 1 else wishes
    return max(1, math.ceil(most * share))


def run(
    placement: Placement,
    compute: Compute,
    parameters: PyTree[Array],
    partitions: PyTree[PartitionSpec],
    x: Float[Array, "rows t d"],
    choices: Int[Array, "rows t k"],
    gains: Float[Array, "rows t k"],
    count: int,
) -> tuple[Float[Array, "rows t d"], Int[Array, ""]]:
    """(Σ_k gain · expert(x), wishes that were dropped) of tokens over all devices but those of other stages.

    Args:
      parameters: of all experts; those that lead with the experts are cut over `layout.expert_axes` (`partitions`).
      choices: `count` where a token wants no expert.
    """
    layout = placement.layout
    axes, devices = layout.expert_axes, layout.ep
    padding = -x.shape[1] % (layout.cp * layout.tp)
    wanted = jnp.pad(choices, ((0, 0), (0, padding), (0, 0)), constant_values=count)
    local = partial(_local, compute, axes, devices, count, placement.expert_capacity)
    cut = PartitionSpec("dp", ("cp", "tp"))
    # Not tracked: jax would name a pipeline's axis, that of the `shard_map` around this one, twice.
    mesh = None if placement.inside else placement.mesh
    over_devices = partial(jax.shard_map, mesh=mesh, axis_names=set(TOKENS), check_vma=False)

    def forward(parameters: PyTree[Array], x: Array, gains: Array, choices: Array) -> tuple[Array, Array]:
        specs = (partitions, cut, cut, cut)
        return over_devices(local, in_specs=specs, out_specs=(cut, PartitionSpec()))(parameters, x, gains, choices)

    def backward(kept: tuple, cotangents: tuple[Array, Array]) -> tuple[PyTree[Array], Array, Array, None]:
        def pulled(parameters: PyTree[Array], x: Array, gains: Array, choices: Array, d_y: Array) -> tuple:
            _, pull = jax.vjp(lambda p, x, g: local(p, x, g, choices)[0], parameters, x, gains)
            d_parameters, *others = pull(d_y)
            return jax.tree.map(partial(summed, over=TOKENS), d_parameters, partitions), *others

        specs = (partitions, cut, cut, cut, cut)
        return *over_devices(pulled, in_specs=specs, out_specs=(partitions, cut, cut))(*kept, cotangents[0]), None

    # Its own backward pass, which computes the experts again: inside of a pipeline jax cannot lower the one that it
    # derives from a `shard_map` in a `shard_map`.
    exchanged = jax.custom_vjp(forward)
    exchanged.defvjp(lambda *given: (forward(*given), given), backward)
    pad = lambda a: jnp.pad(a, ((0, 0), (0, padding), (0, 0)))  # noqa: E731
    y, dropped = exchanged(parameters, pad(x), pad(gains), wanted)
    return y[:, : x.shape[1]], dropped


def summed(x: Array, own: PartitionSpec, over: tuple[str, ...]) -> Array:
    """A gradient of what `own` cuts, from tokens that lay `over` these axes."""
    rest = tuple(axis for axis in over if axis not in axes_of(own))
    return jax.lax.psum(x, rest) if rest else x


def _local(
    compute: Compute,
    axes: tuple[str, ...],
    devices: int,
    count: int,
    share: float,
    parameters: PyTree[Array],
    x: Array,
    gains: Array,
    choices: Array,
) -> tuple[Array, Array]:
    """One device's part: [rows, t, d] of its own tokens."""
    y, dropped = _of_tokens(
        compute, axes, devices, count, share, parameters, *(a.reshape(-1, a.shape[-1]) for a in (x, gains, choices))
    )
    return y.reshape(*x.shape[:2], -1), jax.lax.psum(dropped, TOKENS)


def _of_tokens(
    compute: Compute,
    axes: tuple[str, ...],
    devices: int,
    count: int,
    share: float,
    parameters: PyTree[Array],
    x: Float[Array, "n d"],
    gains: Float[Array, "n k"],
    choices: Int[Array, "n k"],
) -> tuple[Float[Array, "n d"], Int[Array, ""]]:
    """One device's, on its own."""
    n, top_k = choices.shape
    if devices == 1:  # which has them all
        made = by_expert(partial(compute, parameters), x, choices.reshape(-1), count, copies=top_k)
        return _weighted(made, gains), jnp.int32(0)
    mine = count // devices  # experts
    block = capacity(n * top_k, devices, n, top_k, mine, share)
    wishes = choices.reshape(-1)
    sent = _places(jnp.where(wishes < count, wishes // mine, devices), devices, block)
    rows = jnp.zeros((devices, block, x.shape[1]), x.dtype)
    rows = rows.at[sent.device, sent.place].set(x[jnp.arange(n * top_k) // top_k], mode="drop")
    expert = jnp.full((devices, block), mine, jnp.int32).at[sent.device, sent.place].set(wishes % mine, mode="drop")
    got, wanted = _exchange(rows, axes), _exchange(expert, axes)
    made = by_expert(partial(compute, parameters), got.reshape(-1, x.shape[1]), wanted.reshape(-1), mine)
    back = _exchange(made.reshape(rows.shape), axes)
    taken = back.at[sent.device, sent.place].get(mode="fill", fill_value=0)
    return _weighted(taken, gains), ((wishes < count) & (sent.device == devices)).sum()


def _weighted(taken: Float[Array, "m d"], gains: Float[Array, "n k"]) -> Float[Array, "n d"]:
    return (taken.reshape(*gains.shape, -1) * gains[..., None].astype(taken.dtype)).sum(axis=1)


def _places(device: Int[Array, " m"], devices: int, block: int) -> Sent:
    """Wishes in their order, each at the next place of its device's block."""
    ahead = jnp.cumsum(jax.nn.one_hot(device, devices, dtype=jnp.int32), axis=0)
    place = jnp.take_along_axis(ahead, jnp.minimum(device, devices - 1)[:, None], axis=1)[:, 0] - 1
    fits = (device < devices) & (place < block)
    return Sent(jnp.where(fits, device, devices), jnp.where(fits, place, block))


def _exchange(x: Array, axes: tuple[str, ...]) -> Array:
    """Block i of every device to device i; what comes back leads with the senders. Every collective of `ragged` sizes
    would be here."""
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True) if axes else x


def by_expert(
    compute: Callable[[Array, Array], Array],
    x: Float[Array, "n d"],
    expert: Int[Array, " m"],
    count: int,
    copies: int = 1,
) -> Float[Array, "m o"]:
    """`compute` of rows sorted by expert, in the order they came.

    Args:
      compute: (sorted rows, rows of each of the `count` experts) -> rows.
      expert: of each row; what is `count` comes last, to no expert, and gives 0.
      copies: rows that are made of each of x, side by side: m = n * copies.
    """
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
    return compute(x[order // copies], sizes)[jnp.argsort(order)]
