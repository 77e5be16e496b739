"""The gated delta rule by chunks of tokens: matrix products within a chunk, one state from chunk to chunk.

With S the state before a chunk and D_ij = Σ_{j<m<=i} g_m the log-decay from token j to i, a head's updates U solve

    (I + β L) U = β (V - (K ∘ e^{D_i·}) S),    L_ij = k_i · (e^{D_ij} ∘ k_j) for j < i

and out = (Q ∘ e^{D_i·}) S + A U with A_ij = q_i · (e^{D_ij} ∘ k_j) for j <= i; what is of another segment is left out
of both. To write L as a product of two factors, D_ij is split at a token between j and i: a chunk is halved again and
again, and the pairs of its two halves meet at the middle. Both exponents are sums of log-decays, so neither is above 0
whatever the decay, where splitting at the chunk's start would need e^{-D}, which overflows. The triangle is inverted
over the same halves.

Source: the parallel form over the length of the delta rule, arXiv 2406.06484; its gates, arXiv 2412.06464 (scalar) and
arXiv 2510.26692 (per channel).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rlx_kernels.delta_rule.packing import Recurrent

CHUNK = 64  # tokens, a power of two
SMALL = 4  # up to here a product of blocks is written as a sum: a call to a matrix product costs more


def delta_rule(
    query: Float[Array, "rows tokens heads key_width"],
    key: Float[Array, "rows tokens heads key_width"],
    value: Float[Array, "rows tokens heads value_width"],
    decay: Float[Array, "rows tokens heads channels"],
    beta: Float[Array, "rows tokens heads"],
    ordinal: Int[Array, "rows tokens"],
    initial_state: Float[Array, "rows heads key_width value_width"],
    *,
    chunk: int = CHUNK,
) -> Recurrent:
    """`rlx_kernels.delta_rule.delta_rule` of checked arguments of one float dtype; `channels` is 1 or key_width."""
    tokens = query.shape[1]
    token = _Tokens(*(_split(x, chunk) for x in (query, key, value, decay, beta[..., None])))
    before, ordinal = _split_ordinal(ordinal, chunk)
    # Within the chunk everything is worked out anew for the backward pass: kept are the arguments and what it returns.
    work = jax.checkpoint(_within)(token, before, ordinal)
    state, (updates, states) = lax.scan(_across, initial_state, jax.tree.map(_chunks_first, work.carried))
    updates, states = (jnp.moveaxis(x, 0, 2) for x in (updates, states))
    out = _dot("...ik,...kv->...iv", work.query, states) + _dot("...ij,...jv->...iv", work.pairs, updates)
    return Recurrent(_join(out, tokens), state)


class _Tokens(NamedTuple):
    """[rows, heads, chunks, C, width]"""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    beta: jax.Array


class _Carried(NamedTuple):
    """What the passage from chunk to chunk reads; leading axes rows, heads, chunks."""

    update: jax.Array  # [C, value_width], the updates if the state before the chunk were 0
    read: jax.Array  # [C, key_width], what each update takes off, times the state
    write: jax.Array  # [C, key_width], keys decayed to the end of the chunk
    keep: jax.Array  # [key_width or 1, 1], the share of the state that is left


class _Work(NamedTuple):
    carried: _Carried
    query: jax.Array  # [C, key_width], decayed from the start of the chunk
    pairs: jax.Array  # [C, C], of queries with keys


def _within(token: _Tokens, before: jax.Array, ordinal: jax.Array) -> _Work:
    """Everything that needs no state. `before` is the ordinal of the token before each chunk."""
    start, end, of_keys, of_queries = _pairs(token)
    size = token.key.shape[-2]
    same = ordinal[..., :, None] == ordinal[..., None, :]
    lower = jnp.tril(jnp.ones((size, size), bool))
    matrix = jnp.where(same & jnp.tril(lower, -1), token.beta * of_keys, 0)
    inverse = _inverse(matrix)
    goes_on = (ordinal == before)[..., None]  # from the state before the chunk
    reaches = (ordinal == ordinal[..., -1:])[..., None]  # the end of the chunk
    start = jnp.where(goes_on, jnp.exp(start), 0)
    carried = _Carried(
        update=_dot("...ij,...jv->...iv", inverse, token.beta * token.value),
        read=_dot("...ij,...jk->...ik", inverse, token.beta * token.key * start),
        write=jnp.where(reaches, token.key * jnp.exp(end), 0),
        keep=start[..., -1, :, None],
    )
    return _Work(carried, token.query * start, jnp.where(same & lower, of_queries, 0))


def _across(state: jax.Array, carried: _Carried) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    update = carried.update - _dot("rhik,rhkv->rhiv", carried.read, state)
    return carried.keep * state + _dot("rhik,rhiv->rhkv", carried.write, update), (update, state)


# ---------------------------------------------------------------------------------------------------- halves of halves


class _Blocks(NamedTuple):
    """A chunk cut into blocks; leading axes rows, heads, chunks, blocks."""

    start: jax.Array  # [tokens of a block, channels], log-decay from the block's start to each token, its own included
    end: jax.Array  # from each token to the block's end


def _pairs(token: _Tokens) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(log-decay from the chunk's start to each token, from each to its end, key-key and query-key pairs [C, C]).

    What stands above the diagonal means nothing.
    """
    scalar = token.decay.shape[-1] == 1
    both = jnp.stack([token.key, token.query])
    decay = token.decay[..., None, :]
    blocks = _Blocks(decay, jnp.zeros_like(decay))
    # [..., blocks, s, s]: of a scalar decay the exponents, else the pairs themselves
    inner = jnp.zeros_like(decay) if scalar else (both * token.key).sum(-1)[..., None, None]
    while (size := blocks.start.shape[-2]) < token.key.shape[-2]:
        starts, ends = _halves(blocks.start), _halves(blocks.end)
        into, out_of = starts[..., 1, :, :], ends[..., 0, :, :]
        if scalar:
            crossing = into + jnp.swapaxes(out_of, -1, -2)
        else:
            later, earlier = _cut(both, size)[..., 1, :, :], _cut(token.key, size)[..., 0, :, :]
            crossing = _product_of_blocks(later * jnp.exp(into), jnp.swapaxes(earlier * jnp.exp(out_of), -1, -2))
        inner = _lower(inner, crossing)
        blocks = _joined(starts, ends)
    start, end, inner = blocks.start[..., 0, :, :], blocks.end[..., 0, :, :], inner[..., 0, :, :]
    if scalar:
        inner = _dot("...id,...jd->...ij", both, token.key) * jnp.exp(inner)
    return start, end, inner[0], inner[1]


def _joined(starts: jax.Array, ends: jax.Array) -> _Blocks:
    """Blocks of twice the size."""
    totals = starts[..., -1:, :]
    start = jnp.concatenate([starts[..., 0, :, :], starts[..., 1, :, :] + totals[..., 0, :, :]], axis=-2)
    end = jnp.concatenate([ends[..., 0, :, :] + totals[..., 1, :, :], ends[..., 1, :, :]], axis=-2)
    return _Blocks(start, end)


@jax.custom_vjp
def _inverse(strict: Float[Array, "*batch c c"]) -> Float[Array, "*batch c c"]:
    """(I + strict)^-1 of a strictly lower triangle, by blocks: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]."""
    size = strict.shape[-1]
    inverse = jnp.ones((*strict.shape[:-2], size, 1, 1), strict.dtype)
    while (half := inverse.shape[-1]) < size:
        corner = _corners(strict, half)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _lower(inverse, -_product_of_blocks(second, _product_of_blocks(corner, first)))
    return inverse[..., 0, :, :]


def _inverse_backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    d_matrix = _dot("...ji,...jk->...ik", inverse, _dot("...ij,...kj->...ik", d_inverse, inverse))
    return (jnp.tril(-d_matrix, -1),)


_inverse.defvjp(lambda strict: (inverse := _inverse(strict), inverse), _inverse_backward)


def _cut(x: jax.Array, size: int) -> jax.Array:
    """[..., C, d] -> [..., pairs of blocks, 2, size, d]"""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * size), 2, size, x.shape[-1])


def _halves(x: jax.Array) -> jax.Array:
    """[..., blocks, size, d] -> [..., pairs of blocks, 2, size, d]"""
    return x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])


def _corners(matrix: jax.Array, half: int) -> jax.Array:
    """[..., C, C] -> [..., C / 2 half, half, half]: the lower left quarter of each block of 2 half on the diagonal."""
    *batch, size, _ = matrix.shape
    count = size // (2 * half)
    blocks = matrix.reshape(*batch, count, 2, half, count, 2, half)[..., 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)


def _lower(inner: jax.Array, crossing: jax.Array) -> jax.Array:
    """Two blocks [s, s] of a diagonal and what lies between them -> [2 s, 2 s]."""
    first, second = inner[..., 0::2, :, :], inner[..., 1::2, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([crossing, second], axis=-1)], axis=-2)


def _product_of_blocks(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[-2] > SMALL:
        return _dot("...ij,...jk->...ik", a, b)
    return (a[..., :, None, :] * jnp.swapaxes(b, -1, -2)[..., None, :, :]).sum(-1)


# ------------------------------------------------------------------------------------------------------------- chunks


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[rows, T, heads, d] -> [rows, heads, chunks, C, d]; what is added has beta and decay 0."""
    rows, tokens, heads, width = x.shape
    count = -(-tokens // chunk)
    x = jnp.pad(x, ((0, 0), (0, count * chunk - tokens), (0, 0), (0, 0)))
    return jnp.moveaxis(x.reshape(rows, count, chunk, heads, width), 3, 1)


def _split_ordinal(ordinal: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """(of the token before each chunk [rows, 1, chunks, 1], of each token [rows, 1, chunks, C])."""
    rows, tokens = ordinal.shape
    count = -(-tokens // chunk)
    padded = jnp.pad(ordinal, ((0, 0), (0, count * chunk - tokens)), mode="edge").reshape(rows, 1, count, chunk)
    before = jnp.pad(padded[..., :-1, -1:], ((0, 0), (0, 0), (1, 0), (0, 0)))
    return before, padded


def _chunks_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)


def _join(x: jax.Array, tokens: int) -> jax.Array:
    """[rows, heads, chunks, C, d] -> [rows, T, heads, d]"""
    rows, heads, count, chunk, width = x.shape
    return jnp.moveaxis(x, 1, 3).reshape(rows, count * chunk, heads, width)[:, :tokens]


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix units would round float32 operands first if they were not told to keep them."""
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST)
