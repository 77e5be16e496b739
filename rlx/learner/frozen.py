"""What frozen policies say of a micro-batch's targets: the forward pass and the output head, no gradient.

The rows are those of an update, so nothing is computed that the loss does not depend on, and the head runs on the
targets alone. A policy may have another architecture than the trained one, and a vocabulary of which it shares a part.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from rlx.learner.step import MicroBatch, StepConfig, combine, hidden_of_targets, stats_of_hidden
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import head_matrix

TOP_TOKENS = 256  # tokens whose logits are held at once where likeliest ids are looked for


@struct.dataclass
class SharedIds:
    """The ids that a policy has in common with the trained one. They have the same number in both."""

    ids: Array  # int32 [S], ascending
    places: Array  # int32 [V]: where an id of the trained policy is among `ids`, 0 for one that is not
    width: Array  # int32 []: the policy embeds ids below it


class FrozenStats(NamedTuple):
    """Of the targets of R rows; log-probs are those among the shared ids. At ids that are not shared they mean nothing.

    candidates: of the micro-batch's head_ids, or of all V ids of the trained policy.
    """

    logprobs: Float[Array, "rows targets"]
    candidates: Float[Array, "rows targets K"] | None
    likeliest: Int[Array, "rows targets top"] | None


def scoring_config(config: StepConfig, arch: Architecture, adapter_scale: float | None) -> StepConfig:
    """An update's settings for a forward pass of a frozen policy, alike for all strengths of an objective."""
    distill = dataclasses.replace(config.objective.distill, lam=1.0, alpha=1.0, weights=(1.0,))
    objective = dataclasses.replace(config.objective, distill=distill)
    return dataclasses.replace(config, arch=arch, adapter_scale=adapter_scale, objective=objective, remat="none")


@partial(jax.jit, static_argnums=(0, 1))
def frozen_stats(
    config: StepConfig, top: int, trainable: Params, frozen: Params, shared: SharedIds | None, batch: MicroBatch
) -> FrozenStats:
    """Statistics of the micro-batch's targets under a policy.

    Args:
      config: of `scoring_config`.
      top: likeliest ids to return for each target, 0 = none.
      trainable, frozen: as an update takes them: (adapter, parameters), or (parameters, anything).
      shared: None where the policy's ids are those of the trained policy, all of them.
    """
    params, adapter = combine(config, frozen, trainable)
    head, tokens, targets = head_matrix(params), batch.tokens, batch.target_tokens
    candidates = batch.head_ids
    if config.objective.distill.form == "full":
        vocabulary = head.shape[0] if shared is None else shared.places.shape[0]
        candidates = jnp.broadcast_to(jnp.arange(vocabulary), (*targets.shape, vocabulary))
    if shared is not None:
        head = head[shared.ids]
        tokens = jnp.where(tokens < shared.width, tokens, 0)
        targets = shared.places[targets]
        candidates = None if candidates is None else shared.places[candidates]
    own = dataclasses.replace(batch, tokens=tokens, routes=None)
    hidden, _ = hidden_of_targets(config, params, adapter, own)
    flat = None if candidates is None else candidates.reshape(-1, candidates.shape[-1])
    stats = stats_of_hidden(config, hidden, head, targets.ravel(), flat)
    found = _likeliest(hidden, head, top) if top else None
    if found is not None and shared is not None:
        found = shared.ids[found]
    rows = lambda x: None if x is None else x.reshape(*targets.shape, *x.shape[1:])  # noqa: E731
    return FrozenStats(stats.logprob.reshape(targets.shape), rows(stats.candidate_logprobs), rows(found))


def _likeliest(hidden: Float[Array, "tokens d"], head: Float[Array, "ids d"], top: int) -> Int[Array, "tokens top"]:
    padding = -len(hidden) % TOP_TOKENS
    chunks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, TOP_TOKENS, hidden.shape[-1])
    found = jax.lax.map(lambda x: jax.lax.top_k(x @ head.T, top)[1], chunks)
    return found.reshape(-1, top)[: len(hidden)]
