"""From per-token losses to one number: the weight of every token, computed once from the whole optimizer batch.

With weights fixed before the batch is cut, loss = Σ weight · token loss is a plain sum: micro-batches, packed rows and
data-parallel shards add up to it exactly, whatever their number and shape.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.config.objective import ObjectiveConfig


def aggregation_weights(
    config: ObjectiveConfig, mask: Bool[Array, " tokens"], sequences: Int[Array, " tokens"], num_sequences: int
) -> Float[Array, " tokens"]:
    """Weight of each token of the whole optimizer batch in the loss; 0 at masked tokens.

    N trained tokens, S sequences with at least one, n_s trained tokens of sequence s, L `config.constant_length`:

        token_mean                     1 / N          DAPO, arXiv 2503.14476
        sequence_mean_token_mean       1 / (S n_s)    GRPO, arXiv 2402.03300
        sequence_mean_token_sum        1 / S          Williams 1992, an episode's sum
        sequence_mean_token_sum_norm   1 / (S L)      Dr. GRPO, arXiv 2503.20783

    Args:
      mask: the trained tokens.
      sequences: the sequence each token is of, 1 ... num_sequences; 0 and masked tokens are ignored.
      num_sequences: static bound of the ids.
    """
    mask = mask & (sequences > 0)
    ids = jnp.where(mask, sequences, 0)
    lengths = jax.ops.segment_sum(mask.astype(jnp.int32), ids, num_segments=num_sequences + 1)
    return weights_of_slice(config, mask, lengths[ids], jnp.sum(lengths), jnp.sum(lengths > 0))


def weights_of_slice(
    config: ObjectiveConfig,
    mask: Bool[Array, "*tokens"],
    lengths: Int[Array, "*tokens"],
    num_tokens: Int[Array, ""],
    num_sequences: Int[Array, ""],
) -> Float[Array, "*tokens"]:
    """`aggregation_weights` of any slice of the batch, from counts over the whole batch.

    Args:
      lengths: n_s of each token's own sequence.
      num_tokens: N.
      num_sequences: S.
    """
    count = jnp.maximum(num_sequences, 1)
    match config.aggregation:
        case "token_mean":
            denominator = jnp.maximum(num_tokens, 1)
        case "sequence_mean_token_mean":
            denominator = count * jnp.maximum(lengths, 1)
        case "sequence_mean_token_sum":
            denominator = count
        case "sequence_mean_token_sum_norm":
            denominator = count * config.constant_length
    return jnp.where(mask, 1 / denominator, 0)


def aggregate(weights: Float[Array, " tokens"], per_token: Float[Array, " tokens"]) -> Float[Array, ""]:
    """Σ weight · x over the tokens that have a weight: this slice's share of the whole batch's number."""
    return jnp.sum(jnp.where(weights > 0, weights * per_token, 0))
