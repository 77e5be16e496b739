"""Products of a chunk's queries and keys with its keys, each pair decayed from the one token to the other.

e^{D_ij} of the log-decay D_ij from token j to i has to be split into a factor of i and one of j to be part of a matrix
product. Split at the chunk's start the second would be e^{-D}, which overflows. Here sums begin anew in every block of
8 tokens. Within a block they are split at its middle, which is at most four tokens away; beyond, a chunk is halved
again and again, and the pairs of its two halves meet at the middle: there both exponents are sums of log-decays, never
above 0. No sum is the difference of two large ones either, which would cost digits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 8  # tokens


class Decayed(NamedTuple):
    """Of each chunk; what stands above the diagonals means nothing."""

    start: jax.Array  # [C, channels], log-decay from the chunk's start to each token, its own included
    end: jax.Array  # [C, channels], from each token to the chunk's end
    of_keys: jax.Array  # [C, C], k_i · (e^{D_ij} ∘ k_j)
    of_queries: jax.Array  # [C, C], q_i · (e^{D_ij} ∘ k_j)


def scalar_pairs(
    query: Float[Array, "*batch c key_width"],
    key: Float[Array, "*batch c key_width"],
    decay: Float[Array, "*batch c 1"],
) -> Decayed:
    """One decay for all channels: the products as they are, times e^{D_ij}."""
    size, count = key.shape[-2], key.shape[-2] // BLOCK
    blocks = _blocks(jnp.maximum(decay, 1.15 * _log_smallest(decay)))
    sums = _block_sums(blocks)
    start, end = sums.start[..., 0], sums.end[..., 0]  # [..., blocks, BLOCK]
    i, j, k = np.ogrid[:count, :count, :count]
    between = _summed("ijk,...k->...ij", (j < k) & (k < i), sums.totals[..., 0])
    across = start[..., :, :, None, None] + between[..., :, None, :, None] + end[..., None, None, :, :]
    i, j, k = np.ogrid[:BLOCK, :BLOCK, :BLOCK]
    inside = _summed("ijk,...k->...ij", (j < k) & (k <= i), blocks[..., 0])[..., :, None, :]
    same = np.eye(count, dtype=bool)[:, None, :, None]
    exponent = jnp.where(same, inside, across).reshape(*key.shape[:-1], size)
    gains = jnp.exp(jnp.where(np.tri(size, dtype=bool), exponent, 0))  # above the diagonal they would overflow
    products = dot("...id,...jd->...ij", jnp.concatenate([key, query], axis=-2), key)
    of_keys, of_queries = products[..., :size, :] * gains, products[..., size:, :] * gains
    return Decayed(*_over(sums, count), of_keys, of_queries)


def channel_pairs(
    query: Float[Array, "*batch c d"], key: Float[Array, "*batch c d"], decay: Float[Array, "*batch c d"]
) -> Decayed:
    """A decay for each channel. Rows are the keys and the queries of each block, so that a product has all of them."""
    *batch, size, width = key.shape
    count = size // BLOCK
    blocks = _blocks(jnp.maximum(decay, _lowest(decay)))
    sums, middle = _block_sums(blocks), BLOCK // 2 - 1
    keys = key.reshape(blocks.shape)
    rows = jnp.stack([keys, query.reshape(keys.shape)], axis=-3)  # [..., blocks, 2, BLOCK, d]
    i, j = np.ogrid[:BLOCK, :BLOCK]
    signs = 1 * ((middle < j) & (j <= i)) - 1 * ((i < j) & (j <= middle))
    from_middle = _summed("ij,...jd->...id", signs, blocks)  # its own sums, not differences of those from the start
    flat = lambda x, n: x.reshape(*batch, n, -1, width)  # noqa: E731
    near = flat(rows * jnp.exp(from_middle)[..., None, :, :], count)
    inner = dot("...id,...jd->...ij", near, keys * jnp.exp(-from_middle))
    half = 1  # blocks
    while half < count:
        start, end = _over(sums, half)
        halves = (*batch, count // (2 * half), 2, half, BLOCK, width)
        into = jnp.exp(start.reshape(halves)[..., 1, :, :, :])
        later = rows.reshape(*halves[:-2], 2, BLOCK, width)[..., 1, :, :, :, :] * into[..., None, :, :]
        earlier = (keys.reshape(halves) * jnp.exp(end.reshape(halves)))[..., 0, :, :, :]
        inner = lower_block(inner, dot("...id,...jd->...ij", *(flat(x, halves[-5]) for x in (later, earlier))))
        half *= 2
    inner = inner.reshape(*batch, count, 2, BLOCK, size)
    of_keys, of_queries = (inner[..., n, :, :].reshape(*batch, size, size) for n in range(2))
    return Decayed(*_over(sums, count), of_keys, of_queries)


def lower_block(inner: jax.Array, crossing: jax.Array) -> jax.Array:
    """Blocks of a diagonal [..., 2 n, r, s] and, of each two, what lies between [..., n, r, s] -> [..., n, 2 r, 2 s]"""
    first, second = inner[..., 0::2, :, :], inner[..., 1::2, :, :]
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([crossing, second], axis=-1)], axis=-2)


def dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix units would round float32 operands first if they were not told to keep them."""
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST)


def _log_smallest(decay: jax.Array) -> float:
    """-87 in float32. What is well below is a decay to 0, and its sums lose fewer digits than those of -inf's like."""
    return float(np.log(jnp.finfo(decay.dtype).smallest_normal))


def _lowest(decay: jax.Array) -> float:
    """-20 in float32: half a block of it is within the exponents, and e^-20 of a state is less than float32 sees beside
    what a token adds."""
    return 0.92 * _log_smallest(decay) / (BLOCK / 2)


class _Sums(NamedTuple):
    """Of the log-decays in each block, [..., blocks, BLOCK, d]."""

    start: jax.Array  # from the block's start to each token, its own included
    end: jax.Array  # from each token to the block's end

    @property
    def totals(self) -> jax.Array:
        return self.start[..., -1, :]


def _blocks(decay: Float[Array, "*batch c d"]) -> jax.Array:
    return decay.reshape(*decay.shape[:-2], -1, BLOCK, decay.shape[-1])


def _block_sums(blocks: jax.Array) -> _Sums:
    i, j = np.ogrid[:BLOCK, :BLOCK]
    return _Sums(*(_summed("ij,...jd->...id", chosen, blocks) for chosen in (j <= i, j > i)))


def _over(sums: _Sums, blocks: int) -> tuple[jax.Array, jax.Array]:
    """The same sums [..., C, d] from the start and to the end of every so many blocks."""
    count = sums.start.shape[-3]
    i, j = np.ogrid[:count, :count]
    together = i // blocks == j // blocks
    before, after = (_summed("ij,...jd->...id", together & far, sums.totals) for far in (j < i, j > i))
    joined = (sums.start + before[..., None, :], sums.end + after[..., None, :])
    start, end = (x.reshape(*x.shape[:-3], count * BLOCK, x.shape[-1]) for x in joined)
    return start, end


def _summed(formula: str, chosen: np.ndarray, x: jax.Array) -> jax.Array:
    """Sums of what is chosen (1, or -1), as a product."""
    return dot(formula, jnp.asarray(chosen, x.dtype), x)
