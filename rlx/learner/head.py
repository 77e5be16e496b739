"""The output head on a mesh: tokens over dp, cp and stages, the vocabulary over tp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from rlx_kernels.logprob import Precision, TokenStats, token_stats

from rlx.parallel.layout import AXES
from rlx.parallel.mesh import Placement

# Tokens of the head are cut over all that is not the vocabulary's; each stage of a pipeline takes a share.
TOKENS = tuple(axis for axis in AXES if axis != "tp")


def sharded_token_stats(
    placement: Placement,
    hidden: Float[Array, "tokens d"],
    head: Float[Array, "vocab d"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens k"] | None,
    *,
    temperature: float,
    precision: Precision | None,
    implementation: str | None,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` of tokens over all devices, the vocabulary over tp."""
    layout = placement.layout
    padding = -len(hidden) % (layout.devices // layout.tp)
    pad = lambda x: jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])  # noqa: E731
    rows, ids, others = jax.tree.map(pad, (hidden, targets, candidates))
    tokens = PartitionSpec(TOKENS)

    def local(hidden: Array, head: Array, targets: Array, candidates: Array | None) -> TokenStats:
        return token_stats(
            hidden,
            head,
            targets,
            candidates,
            temperature=temperature,
            vocab_axis="tp",
            precision=precision,
            implementation=implementation,
        )

    stats = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(tokens, PartitionSpec("tp"), tokens, tokens),
        out_specs=tokens,
    )(rows, head, ids, others)
    return jax.tree.map(lambda x: x[: len(hidden)], stats)
