"""The gated delta rule and its convolution on a mesh: rows over dp, heads over tp, and a row's tokens over cp, of which
rank r holds part r of CP, in order.

Written by hand also where a row is whole: the rule's blocks of blocks have axes that XLA's partitioner cuts in one way
here and in another there, and it moves them between every two products.

Over cp the convolution reads the last inputs of the rank before. The rule's state after a part is linear in the one
before it, S -> A S + B, and so are its outputs. Every rank finds A and B of its own part at once, by one run of the
rule from [0, I] over values [v, 0]; they are gathered (a state each, whatever the row's length), and give every rank
the state that its part begins with. Where a part begins with a new segment that is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from rlx_kernels.delta_rule import causal_convolution, delta_rule

from rlx.parallel.expert import TOKENS, summed
from rlx.parallel.mesh import Placement

ROWS = ("dp", "cp")  # axes that tokens lie over; heads that TP does not divide are computed by all of a tp group


def sharded_convolution(
    placement: Placement,
    x: Float[Array, "rows t channels"],
    weight: Float[Array, "channels width"],
    segment_ids: Int[Array, "rows t"],
) -> Float[Array, "rows t channels"]:
    """`rlx_kernels.delta_rule.causal_convolution`, its output.

    Raises:
      ValueError: where a rank has fewer tokens of a row than the filter looks back.
    """
    layout, before = placement.layout, weight.shape[1] - 1
    if layout.cp > 1 and x.shape[1] // layout.cp < before:
        raise ValueError(
            f"CP{layout.cp} leaves a device {x.shape[1] // layout.cp} tokens of a row, and a convolution reads {before}"
        )
    cut = "tp" if x.shape[2] % layout.tp == 0 else None
    ahead = [(rank, rank + 1) for rank in range(layout.cp - 1)]

    def local(x: Array, weight: Array, ids: Array) -> Array:
        if layout.cp == 1:
            return causal_convolution(x, weight, segment_ids=ids).output
        # The first rank gets zeros, ids of padding.
        x_before, ids_before = (jax.lax.ppermute(a[:, a.shape[1] - before :], "cp", ahead) for a in (x, ids))
        whole, ids = jnp.concatenate([x_before, x], axis=1), jnp.concatenate([ids_before, ids], axis=1)
        return causal_convolution(whole, weight, segment_ids=ids).output[:, before:]

    tokens = PartitionSpec("dp", "cp", cut)
    specs = (tokens, PartitionSpec(cut), PartitionSpec("dp", "cp"))
    return _over_devices(placement, local, specs, tokens)(x, weight, segment_ids)


def sharded_delta_rule(
    placement: Placement,
    query: Float[Array, "rows t key_heads k"],
    key: Float[Array, "rows t key_heads k"],
    value: Float[Array, "rows t heads v"],
    decay: Float[Array, "rows t heads"] | Float[Array, "rows t heads k"],
    beta: Float[Array, "rows t heads"],
    segment_ids: Int[Array, "rows t"],
) -> Float[Array, "rows t heads v"]:
    """`rlx_kernels.delta_rule.delta_rule`, its output. Heads that TP does not divide are held whole."""
    layout = placement.layout
    cut = "tp" if query.shape[2] % layout.tp == 0 and value.shape[2] % layout.tp == 0 else None
    tokens = PartitionSpec("dp", "cp", cut)
    specs = (*(tokens,) * 5, PartitionSpec("dp", "cp"))
    local = partial(_local_rule, layout.cp)
    return _over_devices(placement, local, specs, tokens)(query, key, value, decay, beta, segment_ids)


def _local_rule(
    ranks: int, query: Array, key: Array, value: Array, decay: Array, beta: Array, ids: Array
) -> Float[Array, "rows t heads v"]:
    if ranks == 1:
        return delta_rule(query, key, value, decay, beta, segment_ids=ids).output
    width, keys = value.shape[-1], query.shape[-1]
    nothing = jnp.zeros((*value.shape[:-1], keys), value.dtype)
    shape = (value.shape[0], value.shape[2], keys)
    begin = jnp.broadcast_to(jnp.eye(keys, width + keys, width, dtype=value.dtype), (*shape, width + keys))
    both = jnp.concatenate([value, nothing], axis=-1)
    out, state = delta_rule(query, key, both, decay, beta, segment_ids=ids, initial_state=begin)
    first, last, states = jax.lax.all_gather((ids[:, 0], ids[:, -1], state), "cp")
    held = jnp.zeros((*shape, width), state.dtype)
    starts = [held]
    for rank in range(ranks - 1):
        after = states[rank, ..., width:] @ held + states[rank, ..., :width]
        goes_on = (last[rank] == first[rank + 1]) & (first[rank + 1] > 0)
        held = jnp.where(goes_on[:, None, None, None], after, 0)
        starts.append(held)
    mine = jnp.stack(starts)[jax.lax.axis_index("cp")]
    return out[..., :width] + jnp.einsum("rthk,rhkv->rthv", out[..., width:], mine.astype(out.dtype))


def _over_devices(
    placement: Placement, local: Callable[..., Array], specs: tuple[PartitionSpec, ...], made: PartitionSpec
) -> Callable[..., Array]:
    """`local` over the devices of a stage, with its own backward pass, which computes it again: jax cannot lower the
    one that it derives from a `shard_map` in a pipeline's. The last argument has no gradient."""
    mesh = None if placement.inside else placement.mesh
    over = partial(jax.shard_map, mesh=mesh, axis_names=set(TOKENS), check_vma=False)

    def forward(*given: Array) -> Array:
        return over(local, in_specs=specs, out_specs=made)(*given)

    def pulled(*given: Array) -> tuple[Array, ...]:
        *inputs, ids, d_out = given
        _, pull = jax.vjp(lambda *x: local(*x, ids), *inputs)
        return tuple(summed(d, spec, ROWS) for d, spec in zip(pull(d_out), specs, strict=False))

    def backward(kept: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
        return *over(pulled, in_specs=(*specs, made), out_specs=specs[:-1])(*kept, d_out), None

    function = jax.custom_vjp(forward)
    function.defvjp(lambda *given: (forward(*given), given), backward)
    return function
