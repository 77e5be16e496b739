"""The definition of `TokenStats`, dense: every logit is held and jax differentiates it. For tests and for reading."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob.precision import Precision, product


class TokenStats(NamedTuple):
    """What the objectives need of the softmax over the vocabulary at each of T tokens: float32, in nats."""

    logprob: jax.Array  # [T] log p(target)
    logsumexp: jax.Array  # [T] log of the sum over the vocabulary of e^logit
    entropy: jax.Array  # [T] -sum_v p_v log p_v
    candidate_logprobs: jax.Array | None  # [T, K] log p(candidate), None where none were asked for


def unsupported_reason(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    candidates: jax.Array | None,
    vocab_axis: str | None,
    precision: Precision,
) -> str | None:
    if precision in ("bfloat16_3x", "tensorfloat32"):
        return f"precision={precision!r} has no dense definition: use 'float32' or 'bfloat16'"
    return None


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float,
    vocab_axis: str | None,
    precision: Precision,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` with dense logits: several T·V float32 arrays are alive at once."""
    logits = product(hidden, head, 1, 1, precision) / temperature
    top = _over_shards(lax.pmax, lax.stop_gradient(logits.max(1)), vocab_axis)
    logsumexp = top + jnp.log(_over_shards(lax.psum, jnp.exp(logits - top[:, None]).sum(1), vocab_axis))
    logprobs = logits - logsumexp[:, None]
    probs = jnp.exp(logprobs)
    # 0 log 0 = 0, also in the gradient, where a logit is -inf
    entropy = -_over_shards(lax.psum, (probs * jnp.where(probs > 0, logprobs, 0)).sum(1), vocab_axis)
    if candidates is None:
        return TokenStats(_pick(logprobs, targets[:, None], vocab_axis)[:, 0], logsumexp, entropy, None)
    picked = _pick(logprobs, jnp.concatenate([targets[:, None], candidates], 1), vocab_axis)
    return TokenStats(picked[:, 0], logsumexp, entropy, picked[:, 1:])


def _over_shards(collective, x, vocab_axis):
    return x if vocab_axis is None else collective(x, vocab_axis)


def _pick(logprobs, ids, vocab_axis):
    """logprobs[t, ids[t, k]], NaN where the id is outside the vocabulary."""
    shard_vocab = logprobs.shape[1]
    shards, shard = (1, 0) if vocab_axis is None else (lax.axis_size(vocab_axis), lax.axis_index(vocab_axis))
    local = ids - shard * shard_vocab
    inside = (local >= 0) & (local < shard_vocab)
    picked = jnp.take_along_axis(logprobs, jnp.where(inside, local, 0), axis=1)
    picked = _over_shards(lax.psum, jnp.where(inside, picked, 0), vocab_axis)
    return jnp.where((ids >= 0) & (ids < shards * shard_vocab), picked, jnp.nan)
