"""Attention over packed rows in memory linear in the row: scores exist for a block of queries and a block of keys.

Values and gradients are those of `rlx.models.packed_attention`, whose notation this keeps. The softmax goes over blocks
of keys with a running maximum and mass (online softmax, arXiv 1805.02867); the backward pass makes P again block by
block from L (arXiv 2205.14135). Who sees whom is worked out for each block from positions and segments. A block in
which nobody sees anything, as the causal order, a window or other segments have it, is skipped, in whatever order
tokens lie.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx.models.layers import Ids, visible, wide
from rlx.models.packed_attention import differentiable, gradients_of, product, scores_of

Running = tuple[Array, Array, Array]  # of a block of queries: largest score, mass and Σ weight · value so far


class Blocks(NamedTuple):
    """Static under jit."""

    size: int  # the most tokens of a block, of queries and of keys
    window: int | None


class Rule(NamedTuple):
    """`default_block` of a kind of machine."""

    whole: int  # tokens of the longest row whose scores are held whole
    block: int  # tokens of a block of longer rows


# On a CPU what is fastest (`bench/attention_rows.py`). An accelerator needs more work at once.
CPU, ACCELERATOR = Rule(whole=512, block=256), Rule(whole=1024, block=1024)


def default_block(tokens: int, *, accelerator: bool) -> int:
    """Where none is asked for: tokens of a block of rows of so many `tokens`, 0 = scores are held whole."""
    rule = ACCELERATOR if accelerator else CPU
    return rule.block if tokens > rule.whole else 0


def block_size(asked: int, tokens: int, ranks: int = 1, *, always: bool = False) -> int:
    """Tokens of a block of rows of so many `tokens`, 0 = scores are held whole.

    asked: the most tokens of a block; 0 = as many as a row has.
    ranks: devices that share a row. It is dealt out to them in 2 · ranks parts, none of which shares a block with
      another, so that what the causal order rules out is whole blocks.
    always: blocks even where a row is no longer than one.
    """
    size = asked or tokens
    if size >= tokens and not always:
        return 0
    part = max(tokens // (2 * ranks), 1) if ranks > 1 else tokens
    return -(-part // -(-part // size))


def attend(
    blocks: Blocks,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows s kv_heads d"],
    value: Float[Array, "rows s kv_heads v"],
    queries: Ids,
    keys: Ids,
) -> tuple[Float[Array, "rows t heads v"], Float[Array, "rows t heads 1"]]:
    """(O, L), both float32, or float64 where the inputs are; of any finite value where a query sees no key."""
    query, queries, keys = _kept_inside(query, queries, keys)
    over_keys = _key_blocks(blocks, key, value, keys)
    cut = partial(_cut, blocks.size, key.shape[2])

    def of_queries(_: None, x: tuple[Array, Ids]) -> tuple[None, tuple[Array, Array]]:
        query, ids = x
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        top = jnp.full((*query.shape[:3], 1), jnp.finfo(dtype).min, dtype)
        start = (top, jnp.zeros_like(top), jnp.zeros((*query.shape[:3], value.shape[3]), dtype))
        (top, mass, total), _ = jax.lax.scan(partial(_further, blocks.window, query, ids), start, over_keys)
        mass = jnp.where(mass > 0, mass, 1)  # nothing but skipped blocks
        return None, (total / mass, top + jnp.log(mass))

    _, made = jax.lax.scan(of_queries, None, (cut(query), _cut_ids(blocks.size, queries)))
    out, sums = (_joined(x, query.shape[1]) for x in made)
    return out, sums


def _further(
    window: int | None, query: Array, ids: Ids, running: Running, x: tuple[Array, Array, Ids]
) -> tuple[Running, None]:
    """`running` of a block of queries, with a block of keys more."""
    key, value, key_ids = x
    allowed = visible(ids, key_ids, window)

    def seen(running: Running) -> Running:
        top, mass, total = running
        scores = scores_of(query, key, allowed)
        # What a query has that saw nothing so far, all at the lowest score, is multiplied by 0 here.
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, before = jnp.exp(scores - new), jnp.exp(top - new)
        added = product("rkqs,rksd->rkqd", weights.astype(value.dtype), value)
        return new, mass * before + weights.sum(-1, keepdims=True), total * before + added

    return jax.lax.cond(allowed.any(), seen, lambda running: running, running), None


def pull(
    blocks: Blocks,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows s kv_heads d"],
    value: Float[Array, "rows s kv_heads v"],
    queries: Ids,
    keys: Ids,
    out: Float[Array, "rows t heads v"],
    sums: Float[Array, "rows t heads 1"],
    d_out: Float[Array, "rows t heads v"],
) -> tuple[Float[Array, "rows t heads d"], Float[Array, "rows s kv_heads d"], Float[Array, "rows s kv_heads v"]]:
    """(dQ, dK, dV) as `attend` has its results, of keys that may be some of those that O and L are of."""
    query, queries, keys = _kept_inside(query, queries, keys)
    d_out = seeing(queries, d_out)
    shared = (wide(d_out) * wide(out)).sum(-1, keepdims=True)
    over_keys = _key_blocks(blocks, key, value, keys)
    cut = partial(_cut, blocks.size, key.shape[2])
    zeros = lambda x: jnp.zeros(x.shape, wide(x).dtype)  # noqa: E731

    def of_queries(held: tuple[Array, Array], x: tuple) -> tuple[tuple[Array, Array], Array]:
        query, ids, *rest = x
        numbered = (jnp.arange(len(over_keys[0])), *over_keys)
        step = partial(_pulled, blocks.window, query, ids, *rest)
        (d_query, d_key, d_value), _ = jax.lax.scan(step, (zeros(query), *held), numbered)
        return (d_key, d_value), d_query

    start = zeros(over_keys[0]), zeros(over_keys[1])
    given = (cut(query), _cut_ids(blocks.size, queries), cut(d_out), cut(shared), cut(sums))
    (d_key, d_value), d_query = jax.lax.scan(of_queries, start, given)
    d_query, d_key, d_value = (_joined(d, x.shape[1]) for d, x in ((d_query, query), (d_key, key), (d_value, value)))
    return d_query, d_key, d_value


def _pulled(
    window: int | None,
    query: Array,
    ids: Ids,
    d_out: Array,
    shared: Array,
    sums: Array,
    held: tuple[Array, Array, Array],
    x: tuple[Array, Array, Array, Ids],
) -> tuple[tuple[Array, Array, Array], None]:
    """(dQ of a block of queries, dK and dV of all blocks of keys), with what the two blocks give each other more."""
    number, key, value, key_ids = x
    d_query, d_key, d_value = held
    allowed = visible(ids, key_ids, window)

    def seen() -> tuple[Array, Array, Array]:
        return gradients_of(query, key, value, allowed, sums, shared, d_out)

    nothing = lambda: (jnp.zeros_like(d_query), jnp.zeros_like(d_key[0]), jnp.zeros_like(d_value[0]))  # noqa: E731
    parts = jax.lax.cond(allowed.any(), seen, nothing)
    return (d_query + parts[0], d_key.at[number].add(parts[1]), d_value.at[number].add(parts[2])), None


def blockwise_attention(
    blocks: Blocks,
    query: Float[Array, "rows t heads d"],
    key: Float[Array, "rows t kv_heads d"],
    value: Float[Array, "rows t kv_heads v"],
    ids: Ids,
) -> Float[Array, "rows t heads v"]:
    """`rlx.models.packed_attention.packed_attention`, of a mask that `ids` and the window make."""

    def whole(query: Array, key: Array, value: Array, ids: Ids) -> tuple[Array, Array]:
        return settled(ids, value, attend(blocks, query, key, value, ids, ids))

    def pulled(query: Array, key: Array, value: Array, ids: Ids, *rest: Array) -> tuple[Array, Array, Array]:
        return pull(blocks, query, key, value, ids, ids, *rest)

    return differentiable(whole, pulled)(query, key, value, ids)


def settled(queries: Ids, value: Array, made: tuple[Array, Array]) -> tuple[Array, Array]:
    """(O, L) of all keys as a layer takes them: in the dtype of values, 0 of padding."""
    return seeing(queries, made[0]).astype(value.dtype), made[1]


def seeing(queries: Ids, x: Float[Array, "rows t heads d"]) -> Float[Array, "rows t heads d"]:
    """`x`, 0 of padding: every other token sees itself."""
    return jnp.where((queries.segments > 0)[:, :, None, None], x, 0)


def _kept_inside(query: Array, queries: Ids, keys: Ids) -> tuple[Array, Ids, Ids]:
    """The same. What no layer of a loop changes jax works out before it: all blocks' masks, [t, t] as a whole, if they
    did not seem to depend on the layer."""
    return jax.lax.optimization_barrier((query, queries, keys))


def _key_blocks(blocks: Blocks, key: Array, value: Array, keys: Ids) -> tuple[Array, Array, Ids]:
    cut = partial(_cut, blocks.size, key.shape[2])
    return cut(key), cut(value), _cut_ids(blocks.size, keys)


def _cut(size: int, kv_heads: int, x: Array) -> Array:
    """[rows, T, heads, D] -> [blocks, rows, kv_heads, heads of each · tokens of a block, D]; T is padded to that."""
    rows, length, heads, dim = x.shape
    count, each = _counts(size, length)
    x = jnp.pad(x, ((0, 0), (0, count * each - length), (0, 0), (0, 0)))
    parts = x.reshape(rows, count, each, kv_heads, heads // kv_heads, dim).transpose(1, 0, 3, 4, 2, 5)
    return parts.reshape(count, rows, kv_heads, -1, dim)


def _joined(x: Array, length: int) -> Array:
    """`_cut` undone."""
    count, rows, kv_heads, _, dim = x.shape
    each = -(-length // count)
    parts = x.reshape(count, rows, kv_heads, -1, each, dim).transpose(1, 0, 4, 2, 3, 5)
    return parts.reshape(rows, count * each, -1, dim)[:, :length]


def _cut_ids(size: int, ids: Ids) -> Ids:
    """[rows, T] -> [blocks, rows, tokens of a block]; what T is padded with is padding."""

    def cut(x: Int[Array, "rows t"]) -> Int[Array, "blocks rows each"]:
        count, each = _counts(size, x.shape[1])
        padded = jnp.pad(x, ((0, 0), (0, count * each - x.shape[1])))
        return padded.reshape(len(x), count, each).swapaxes(0, 1)

    return Ids(*(cut(x) for x in ids))


def _counts(size: int, length: int) -> tuple[int, int]:
    """(blocks, tokens of each) of a row, as even as can be."""
    count = -(-length // size)
    return count, -(-length // count)
