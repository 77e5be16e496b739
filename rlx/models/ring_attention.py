"""Attention over a ring of devices (arXiv 2310.01889): keys and values go round, queries stay where they are.

Rank r begins with the keys of its own tokens and has those of rank r - i in turn i: a device holds the keys of as many
tokens as it has, once for itself, once under way, and no others. Results of the turns are merged by their log-sum-exps.
In the backward pass the gradients of keys and values go round with them and are home after the last turn. With the row
dealt out in zig-zag order (`rlx.parallel.context`) every turn has equal work for all, as blocks that the causal order
rules out are skipped.

What is in here runs inside of a `jax.shard_map`, with the tokens of this device; `rlx.models.sharded_attention` has it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rlx.models import blockwise
from rlx.models.blockwise import Blocks
from rlx.models.layers import Ids, wide

AXIS = "cp"


def attend(
    blocks: Blocks,
    ranks: int,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    ids: Ids,
) -> tuple[Float[Array, "rows t heads v"], Float[Array, "rows t heads 1"]]:
    """`rlx.models.blockwise.attend` over the keys of all ranks."""

    def further(made: tuple[Array, Array], moving: tuple[Array, Array, Ids]) -> tuple[Array, Array]:
        key, value, keys = moving
        return merged(made, blockwise.attend(blocks, query, key, value, ids, keys))

    def turn(held: tuple, _: None) -> tuple[tuple, None]:
        moving, made = held
        return (_passed(moving, ranks), further(made, moving)), None

    dtype = jnp.promote_types(query.dtype, jnp.float32)
    top = jnp.full((*query.shape[:3], 1), jnp.finfo(dtype).min, dtype)
    nothing = jnp.zeros((*query.shape[:3], value.shape[3]), dtype), top
    (moving, made), _ = jax.lax.scan(turn, ((key, value, ids), nothing), None, ranks - 1)
    return further(made, moving)


def merged(
    one: tuple[Float[Array, "*q v"], Float[Array, "*q 1"]], other: tuple[Float[Array, "*q v"], Float[Array, "*q 1"]]
) -> tuple[Float[Array, "*q v"], Float[Array, "*q 1"]]:
    """(O, L) over the keys of both."""
    sums = jnp.logaddexp(one[1], other[1])
    return one[0] * jnp.exp(one[1] - sums) + other[0] * jnp.exp(other[1] - sums), sums


def pull(
    blocks: Blocks,
    ranks: int,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    ids: Ids,
    out: Float[Array, "rows t heads v"],
    sums: Float[Array, "rows t heads 1"],
    d_out: Float[Array, "rows t heads v"],
) -> tuple[Float[Array, "rows t heads d"], Float[Array, "rows t kv_heads d"], Float[Array, "rows t kv_heads v"]]:
    """(dQ, dK, dV) of this device's tokens, dK and dV from the queries of all ranks."""

    def further(held: tuple) -> tuple[Array, tuple[Array, Array]]:
        (key, value, keys), d_query, (d_key, d_value) = held
        more = blockwise.pull(blocks, query, key, value, ids, keys, out, sums, d_out)
        return d_query + more[0], _passed((d_key + more[1], d_value + more[2]), ranks)

    def turn(held: tuple, _: None) -> tuple[tuple, None]:
        return (_passed(held[0], ranks), *further(held)), None

    zeros = lambda x: jnp.zeros(x.shape, wide(x).dtype)  # noqa: E731
    start = ((key, value, ids), zeros(query), (zeros(key), zeros(value)))
    held, _ = jax.lax.scan(turn, start, None, ranks - 1)
    d_query, (d_key, d_value) = further(held)
    return d_query, d_key, d_value


def _passed(tree: PyTree[Array], ranks: int) -> PyTree[Array]:
    """What the rank before had."""
    onward = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, onward), tree)
