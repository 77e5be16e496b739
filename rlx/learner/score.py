"""What the learner's policy says of given tokens: the forward pass and the output head, no gradient.

Beside the sampler's own log-probs it shows, token by token, how far the two programs' distributions are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from rlx_kernels.logprob import token_stats

from rlx.learner.step import Batch, MicroBatch, StepConfig, combine, slice_loss, slice_stats
from rlx.models.spec import Params
from rlx.models.transformer import forward, head_matrix

SHORTEST = 64  # tokens of the shortest compiled row


@partial(jax.jit, static_argnums=0)
def score(
    config: StepConfig,
    trainable: Params,
    frozen: Params,
    tokens: Int[Array, "rows t"],
    lengths: Int[Array, " rows"],
) -> Float[Array, "rows t"]:
    """log p(token | the tokens before it in its row) at temperature `config.temperature`, at the token's own index.

    0 at index 0, which nothing predicts, and from a row's length on. One row is computed at a time.
    """
    params, adapter = combine(config, frozen, trainable)
    positions = jnp.arange(tokens.shape[1])

    def row(args: tuple[Array, Array]) -> Array:
        ids, length = args
        hidden = forward(
            config.arch,
            params,
            ids[None],
            positions[None],
            (positions < length).astype(jnp.int32)[None],
            adapter=adapter,
            adapter_scale=config.adapter_scale or 1.0,
            attention_block=config.attention_block,
        )[0]
        stats = token_stats(
            hidden[:-1],
            head_matrix(params),
            ids[1:],
            None,
            temperature=config.temperature,
            precision=config.head_precision,
            implementation=config.logprob_implementation,
        )
        scored = jnp.concatenate([jnp.zeros(1, stats.logprob.dtype), stats.logprob])
        return jnp.where(positions < length, scored, 0.0)

    return jax.lax.map(row, (tokens, lengths))


def mean_loss(config: StepConfig, trainable: Params, frozen: Params, batch: Batch) -> Array:
    """The loss of a batch as an update computes it, without its gradient."""
    total = jnp.zeros((), jnp.float32)
    for micro_batch in batch:
        total += _loss_of_slice(config, trainable, frozen, micro_batch)
    return total


@partial(jax.jit, static_argnums=0)
def _loss_of_slice(config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch) -> Array:
    return slice_loss(config, trainable, frozen, batch)[0]


@partial(jax.jit, static_argnums=0)
def target_logprobs(
    config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch
) -> Float[Array, "rows targets"]:
    """log p of a micro-batch's targets as an update computes it, whole on every device."""
    logprobs = slice_stats(config, trainable, frozen, batch)[0].logprob.reshape(batch.mask.shape)
    return logprobs if config.placement is None else config.placement.cut(logprobs, PartitionSpec())


def score_sequences(
    config: StepConfig, trainable: Params, frozen: Params, sequences: Sequence[np.ndarray], longest: int
) -> list[np.ndarray]:
    """`score` of sequences of any lengths up to `longest`: float32 [length] each.

    Rows are padded to powers of two, so that few shapes are compiled.

    Raises:
      ValueError: for a sequence that is longer.
    """
    if not sequences:
        return []
    most = max(len(s) for s in sequences)
    if most > longest:
        raise ValueError(f"a sequence of {most} tokens is to be scored; at most {longest} fit")
    width = min(max(SHORTEST, 1 << (most - 1).bit_length()), longest)
    tokens = np.zeros((len(sequences), width), np.int32)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)] = sequence
    lengths = np.array([len(s) for s in sequences], np.int32)
    scored = np.asarray(score(config, trainable, frozen, jnp.asarray(tokens), jnp.asarray(lengths)))
    return [scored[i, : len(s)] for i, s in enumerate(sequences)]
