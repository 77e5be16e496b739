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
    size = key.shape[-2]
    bounded = jnp.maximum(decay, 1.15 * _log_smallest(decay))
    start, end = (x[..., 0] for x in _block_sums(bounded))  # [..., blocks, BLOCK]
    totals, count = start[..., -1], size // BLOCK
    i, j, k = np.ogrid[:count, :count, :count]
    between = dot("ijk,...k->...ij", jnp.asarray((j < k) & (k < i), totals.dtype), totals)
    across = start[..., :, :, None, None] + between[..., :, None, :, None] + end[..., None, None, :, :]
    inside = start[..., :, :, None, None] - start[..., :, None, :][..., None, :]
    same = np.eye(count, dtype=bool)[:, None, :, None]
    exponent = jnp.where(same, inside, across).reshape(*key.shape[:-1], size)
    gains = jnp.exp(jnp.where(np.tri(size, dtype=bool), exponent, 0))  # above the diagonal they would overflow
    products = dot("...id,...jd->...ij", jnp.concatenate([key, query], axis=-2), key)
    of_keys, of_queries = products[..., :size, :] * gains, products[..., size:, :] * gains
    return Decayed(*_chunk_sums(start[..., None], end[..., None]), of_keys, of_queries)


def channel_pairs(
    query: Float[Array, "*batch c d"], key: Float[Array, "*batch c d"], decay: Float[Array, "*batch c d"]
) -> Decayed:
    """A decay for each channel. Rows are the keys and the queries of each block, so that a product has all of them."""
    *batch, size, width = key.shape
    start, end = _block_sums(jnp.maximum(decay, _lowest(decay)))
    keys = key.reshape(start.shape)
    rows = jnp.stack([keys, query.reshape(start.shape)], axis=-3)  # [..., blocks, 2, BLOCK, d]
    middle = start[..., BLOCK // 2 - 1 : BLOCK // 2, :]
    flat = lambda x, n: x.reshape(*batch, n, -1, width)  # noqa: E731
    near = flat(rows * jnp.exp(start - middle)[..., None, :, :], size // BLOCK)
    inner = dot("...id,...jd->...ij", near, keys * jnp.exp(middle - start))
    while (half := start.shape[-2]) < size:
        starts, ends = _halves(start), _halves(end)
        pairs = size // (2 * half)
        later = rows.reshape(*batch, pairs, 2, half // BLOCK, 2, BLOCK, width)[..., 1, :, :, :, :]
        into = jnp.exp(starts[..., 1, :, :]).reshape(*batch, pairs, half // BLOCK, 1, BLOCK, width)
        earlier = keys.reshape(*batch, pairs, 2, half, width)[..., 0, :, :] * jnp.exp(ends[..., 0, :, :])
        inner = lower_block(inner, dot("...id,...jd->...ij", flat(later * into, pairs), earlier))
        start, end = _joined(starts, ends)
    inner = inner.reshape(*batch, size // BLOCK, 2, BLOCK, size)
    of_keys, of_queries = (inner[..., n, :, :].reshape(*batch, size, size) for n in range(2))
    return Decayed(start[..., 0, :, :], end[..., 0, :, :], of_keys, of_queries)


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


def _block_sums(decay: Float[Array, "*batch c d"]) -> tuple[jax.Array, jax.Array]:
    """[..., blocks, BLOCK, d]: of the decays from a block's start to each token, and from each token to its end."""
    blocks = decay.reshape(*decay.shape[:-2], -1, BLOCK, decay.shape[-1])
    parts = [blocks[..., i, :] for i in range(BLOCK)]
    start, end = [parts[0]], [jnp.zeros_like(parts[0])]
    for i in range(1, BLOCK):
        start.append(start[-1] + parts[i])
        end.append(end[-1] + parts[-i])
    return jnp.stack(start, axis=-2), jnp.stack(end[::-1], axis=-2)


def _chunk_sums(start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., blocks, BLOCK, d] -> [..., C, d]: the same sums over whole chunks."""
    while start.shape[-3] > 1:
        start, end = _joined(_halves(start), _halves(end))
    return start[..., 0, :, :], end[..., 0, :, :]


def _halves(x: jax.Array) -> jax.Array:
    """[..., blocks, size, d] -> [..., pairs of blocks, 2, size, d]"""
    return x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])


def _joined(starts: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of blocks of twice the size."""
    totals = starts[..., -1:, :]
    start = jnp.concatenate([starts[..., 0, :, :], starts[..., 1, :, :] + totals[..., 0, :, :]], axis=-2)
    end = jnp.concatenate([ends[..., 0, :, :] + totals[..., 1, :, :], ends[..., 1, :, :]], axis=-2)
    return start, end
