"""Estimators of a KL divergence from samples: k1, k2 and k3 (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.importance import log_ratio
from rlx.config.objective import Estimator, ObjectiveConfig


def kl(
    estimator: Estimator, logprobs: Float[Array, " tokens"], reference: Float[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """Per-token estimate of KL(π ‖ reference) from tokens drawn from π; d = log π - log reference.

    k1   d                  Schulman 2020, unbiased, of either sign
    k2   d² / 2             Schulman 2020, biased, its gradient is that of the KL
    k3   exp(-d) - 1 + d    Schulman 2020, unbiased, never negative
    """
    d = log_ratio(logprobs, reference)
    match estimator:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "k3":
            return jnp.expm1(-d) + d


def penalised_rewards(
    config: ObjectiveConfig,
    rewards: Float[Array, " samples"],
    logprobs: Float[Array, " tokens"],
    reference: Float[Array, " tokens"],
    mask: Bool[Array, " tokens"],
    samples: Int[Array, " tokens"],
) -> Float[Array, " samples"]:
    """R - β Σ_t KL_t over the sample's trained tokens: the KL in the reward (arXiv 2203.02155, equation 2).

    Args:
      logprobs: of the policy before the update.
      samples: index into `rewards` of every token; masked tokens are ignored.
    """
    each = kl(config.kl_estimator, jnp.where(mask, logprobs, 0), jnp.where(mask, reference, 0))
    penalty = jax.ops.segment_sum(jnp.where(mask, each, 0), jnp.where(mask, samples, 0), num_segments=rewards.shape[0])
    return rewards - config.kl_coefficient * penalty
