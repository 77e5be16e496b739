"""The gated delta rule by chunks of tokens: matrix products within a chunk, one state from chunk to chunk.

With S the state before a chunk and D_ij = Σ_{j<m<=i} g_m the log-decay from token j to i, a head's updates U solve

    (I + β L) U = β (V - (K ∘ e^{D_i·}) S),    L_ij = k_i · (e^{D_ij} ∘ k_j) for j < i

and out = (Q ∘ e^{D_i·}) S + A U with A_ij = q_i · (e^{D_ij} ∘ k_j) for j <= i; what is of another segment is left out
of both. `decayed` has the two triangles, the other one is inverted here, by halves.

Source: the parallel form over the length of the delta rule, arXiv 2406.06484; its gates, arXiv 2412.06464 (scalar) and
arXiv 2510.26692 (per channel).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rlx_kernels.delta_rule.decayed import channel_pairs, dot, lower_block, scalar_pairs
from rlx_kernels.delta_rule.packing import Recurrent

CHUNK = {"cpu": 32}  # tokens, a power of two; what follows from a chunk's size is half arithmetic, half passes over it
ACCELERATOR_CHUNK = 64
GROUP = {"cpu": 1}  # chunks at once: on a CPU as many as its caches hold, elsewhere what keeps the device busy
ACCELERATOR_GROUP = 32
SMALL = 4  # tokens of a block up to which a product is written as a sum: a call to a matrix product costs more


def delta_rule(
    query: Float[Array, "rows tokens heads key_width"],
    key: Float[Array, "rows tokens heads key_width"],
    value: Float[Array, "rows tokens heads value_width"],
    decay: Float[Array, "rows tokens heads channels"],
    beta: Float[Array, "rows tokens heads"],
    ordinal: Int[Array, "rows tokens"],
    initial_state: Float[Array, "rows heads key_width value_width"],
    *,
    chunk: int | None = None,
    group: int | None = None,
) -> Recurrent:
    """`rlx_kernels.delta_rule.delta_rule` of checked arguments of one float dtype; `channels` is 1 or key_width.

    chunk: tokens, a power of two of at least 8; group: chunks that are worked on at once. None: by platform.
    """
    platform, tokens = jax.default_backend(), query.shape[1]
    chunk = CHUNK.get(platform, ACCELERATOR_CHUNK) if chunk is None else chunk
    group = min(GROUP.get(platform, ACCELERATOR_GROUP) if group is None else group, -(-tokens // chunk))
    split = functools.partial(_split, chunk=chunk, group=group)
    token = _Tokens(*(split(x) for x in (query, key, value, decay, beta[..., None])))
    before, ordinal = _split_ordinal(ordinal, chunk, group)
    # Kept for the backward pass are the arguments and the states between groups.
    # In a loop nothing is shared between the two passes that would have to be kept apart.
    group_of_chunks = jax.checkpoint(_group, prevent_cse=False)
    state, out = lax.scan(group_of_chunks, initial_state, (token, before, ordinal))
    return Recurrent(_join(out, tokens), state)


class _Tokens(NamedTuple):
    """[groups, rows, heads, chunks, C, width]; without its first axis in a group."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    beta: jax.Array


class _Work(NamedTuple):
    """What the passage from chunk to chunk reads; leading axes rows, heads, chunks."""

    update: jax.Array  # [C, value_width], the updates if the state before the chunk were 0
    reads: jax.Array  # [2 C, key_width], times the state: what each update takes off, what each query reads
    write: jax.Array  # [C, key_width], keys decayed to the end of the chunk
    keep: jax.Array  # [key_width or 1, 1], the share of the state that is left
    pairs: jax.Array  # [C, C], of queries with keys


def _group(state: jax.Array, xs: tuple[_Tokens, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the state after the group and its outputs, [chunks, rows, heads, C, value_width]."""
    work = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), _within(*xs))
    return lax.scan(_across, state, work)


def _within(token: _Tokens, before: jax.Array, ordinal: jax.Array) -> _Work:
    """Everything that needs no state. `before` is the ordinal of the token before each chunk."""
    size, value_width = token.value.shape[-2:]
    pairs_of = scalar_pairs if token.decay.shape[-1] == 1 else channel_pairs
    start, end, of_keys, of_queries = pairs_of(token.query, token.key, token.decay)
    same = ordinal[..., :, None] == ordinal[..., None, :]
    strict, lower = (np.tril(np.ones((size, size), bool), k) for k in (-1, 0))
    # masked first: what stands above the diagonal may be infinite, and beta's gradient would see it
    inverse = _inverse(token.beta * jnp.where(same & strict, of_keys, 0))
    goes_on = (ordinal == before)[..., None]  # from the state before the chunk
    reaches = (ordinal == ordinal[..., -1:])[..., None]  # the end of the chunk
    start = jnp.where(goes_on, jnp.exp(start), 0)
    both = dot("...ij,...jv->...iv", inverse, token.beta * jnp.concatenate([token.value, token.key * start], axis=-1))
    return _Work(
        update=both[..., :value_width],
        reads=jnp.concatenate([both[..., value_width:], token.query * start], axis=-2),
        write=jnp.where(reaches, token.key * jnp.exp(end), 0),
        keep=start[..., -1, :, None],
        pairs=jnp.where(same & lower, of_queries, 0),
    )


def _across(state: jax.Array, work: _Work) -> tuple[jax.Array, jax.Array]:
    """One chunk: the state after it and its outputs, [rows, heads, C, value_width]."""
    size = work.update.shape[-2]
    read = dot("rhik,rhkv->rhiv", work.reads, state)
    update = work.update - read[..., :size, :]
    out = read[..., size:, :] + dot("rhij,rhjv->rhiv", work.pairs, update)
    return work.keep * state + dot("rhik,rhiv->rhkv", work.write, update), out


# ------------------------------------------------------------------------------------------------------- the triangle


@jax.custom_vjp
def _inverse(strict: Float[Array, "*batch c c"]) -> Float[Array, "*batch c c"]:
    """(I + strict)^-1 of a strictly lower triangle, by blocks: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']].

    Its terms are as large as the inverse, where those of a series of powers grow far beyond; blocks of 4 are small
    enough for one: (I - A) (I + A²) with A⁴ = 0.
    """
    size, one = strict.shape[-1], jnp.eye(SMALL, dtype=strict.dtype)
    blocks = _blocks(strict, SMALL)
    inverse = _product(one - blocks, one + _product(blocks, blocks))
    while (half := inverse.shape[-1]) < size:
        corner = _blocks(strict, 2 * half)[..., half:, :half]
        inverse = lower_block(inverse, -_product(inverse[..., 1::2, :, :], _product(corner, inverse[..., 0::2, :, :])))
    return inverse[..., 0, :, :]


def _inverse_backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    d_matrix = dot("...ji,...jk->...ik", inverse, dot("...ij,...kj->...ik", d_inverse, inverse))
    return (jnp.tril(-d_matrix, -1),)


_inverse.defvjp(lambda strict: (inverse := _inverse(strict), inverse), _inverse_backward)


def _blocks(matrix: jax.Array, size: int) -> jax.Array:
    """[..., C, C] -> [..., C / size, size, size]: the blocks on the diagonal."""
    *batch, whole, _ = matrix.shape
    count = whole // size
    tiles = matrix.reshape(*batch, count, size, count, size)
    return jnp.stack([tiles[..., i, :, i, :] for i in range(count)], axis=-3)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[-1] > SMALL:
        return dot("...ij,...jk->...ik", a, b)
    return (a[..., :, None, :] * jnp.swapaxes(b, -1, -2)[..., None, :, :]).sum(-1)


# ------------------------------------------------------------------------------------------------------------- chunks


def _split(x: jax.Array, chunk: int, group: int) -> jax.Array:
    """[rows, T, heads, d] -> [groups, rows, heads, chunks, C, d]; what is added has beta and decay 0."""
    rows, tokens, heads, width = x.shape
    count = -(-tokens // (chunk * group))
    x = jnp.pad(x, ((0, 0), (0, count * group * chunk - tokens), (0, 0), (0, 0)))
    return x.reshape(rows, count, group, chunk, heads, width).transpose(1, 0, 4, 2, 3, 5)


def _split_ordinal(ordinal: jax.Array, chunk: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(of the token before each chunk [groups, rows, 1, chunks, 1], of each token [groups, rows, 1, chunks, C])."""
    rows, tokens = ordinal.shape
    count = -(-tokens // (chunk * group))
    chunks = jnp.pad(ordinal, ((0, 0), (0, count * group * chunk - tokens)), mode="edge").reshape(rows, -1, chunk)
    before = jnp.pad(chunks[:, :-1, -1], ((0, 0), (1, 0)))
    placed = lambda x: jnp.moveaxis(x.reshape(rows, count, 1, group, -1), 1, 0)  # noqa: E731
    return placed(before), placed(chunks)


def _join(out: jax.Array, tokens: int) -> jax.Array:
    """[groups, chunks, rows, heads, C, d] -> [rows, T, heads, d]"""
    groups, chunks, rows, heads, size, width = out.shape
    return out.transpose(2, 0, 1, 4, 3, 5).reshape(rows, groups * chunks * size, heads, width)[:, :tokens]
