"""Drawing a token from logits, and what is recorded of it: its log-prob and the K likeliest candidates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

_BLOCK = 128
_GROUP = 16


@struct.dataclass
class Draw:
    """One sampled token a row, all log-probs under the distribution it was drawn from (temperature applied)."""

    tokens: Array  # int32 [rows]
    logprobs: Array  # float32 [rows]
    head_ids: Array  # int32 [rows, K]
    head_logprobs: Array  # float32 [rows, K], descending


def no_draw(rows: int, head_size: int) -> Draw:
    """Zeros, in the shape of a draw."""
    row, head = jnp.zeros(rows), jnp.zeros((rows, head_size))
    return Draw(row.astype(jnp.int32), row, head.astype(jnp.int32), head)


def inverse_cdf(
    weights: Float[Array, "rows vocab"], uniforms: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Ids with probability weights / Σ weights, and Σ weights. `weights` >= 0, `uniforms` in [0, 1).

    Two levels, blocks and then ids in the chosen block: one pass over the vocabulary and one uniform a row, where
    Gumbel-max needs a random number for every id (26 times slower at 64 x 49,152 on a CPU).
    """
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    below_one = 1.0 - jnp.finfo(weights.dtype).eps  # rounding must not carry a target past the last positive weight

    def pick(weights: Array, cumulative: Array, target: Array) -> Array:
        """The first index whose cumulative weight is above the target. A parallel scan rounds each sum in its own way,
        so that it may rise where the weight is zero: such an index is never taken."""
        cumulative = jnp.where(weights > 0, cumulative, 0)
        target = jnp.minimum(target, cumulative.max(axis=-1) * below_one)
        return jnp.argmax(cumulative > target[:, None], axis=1).astype(jnp.int32)

    sums = padded.sum(axis=-1)
    blocks = jnp.cumsum(sums, axis=-1)
    total = blocks[:, -1]
    target = uniforms * total
    block = pick(sums, blocks, target)
    before = jnp.where(block > 0, jnp.take_along_axis(blocks, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + pick(inside, jnp.cumsum(inside, axis=-1), jnp.maximum(target - before, 0)), total


def top_k(values: Float[Array, "rows n"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """The k largest of each row, descending, and their ids. Of equal values any may be taken.

    Two levels: the k groups with the largest maxima hold the k largest values. At 64 x 49,152 and k = 128 on a CPU this
    takes two thirds of `jax.lax.top_k`'s time.
    """
    rows, count = values.shape
    if k * 2 * _GROUP > count:
        largest, at = jax.lax.top_k(values, k)
        return largest, at
    groups = jnp.pad(values, ((0, 0), (0, -count % _GROUP)), constant_values=-jnp.inf).reshape(rows, -1, _GROUP)
    group = jax.lax.top_k(groups.max(axis=-1), k)[1]
    candidates = jnp.take_along_axis(groups, group[:, :, None], axis=1).reshape(rows, -1)
    largest, at = jax.lax.top_k(candidates, k)
    return largest, jnp.take_along_axis(group, at // _GROUP, axis=1) * _GROUP + at % _GROUP


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    seeds: UInt32[Array, " rows"],
    counts: Int[Array, " rows"],
    head_size: int,
) -> Draw:
    """Sample one token a row.

    A row's randomness is a function of its own seed and of how many tokens it has written, so what a request draws
    does not depend on which slot serves it. Temperature 0 takes the likeliest id and reports log-probs at 1.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    largest = scaled.max(axis=-1, keepdims=True)
    keys = jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
    tokens, total = inverse_cdf(jnp.exp(scaled - largest), jax.vmap(jax.random.uniform)(keys))
    likeliest = jax.lax.cond(
        greedy.any(), lambda: scaled.argmax(axis=-1).astype(jnp.int32), lambda: jnp.zeros_like(tokens)
    )
    tokens = jnp.where(greedy, likeliest, tokens)
    logsumexp = jnp.log(total) + largest[:, 0]
    head_values, head_ids = top_k(scaled, head_size)
    return Draw(
        tokens=tokens,
        logprobs=jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0] - logsumexp,
        head_ids=head_ids.astype(jnp.int32),
        head_logprobs=head_values - logsumexp[:, None],
    )
