"""Importance weights: how much a token sampled from q counts under p, and what bounds keep.

r = p / q is unbiased and its variance grows without bound; every bound here trades some bias for less of it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.masked import mean_by_id, sum_by_id
from rlx.config.objective import Level

# Beyond e^±20 a ratio means "never" or "certain"; held there it stays finite, squared too, in value and in gradient.
LOG_RATIO_LIMIT = 20.0


def log_ratio(numerator: Float[Array, "*shape"], denominator: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log numerator - log denominator, held within ±20."""
    return jnp.clip(numerator - denominator, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def at_level(
    level: Level, log_ratios: Float[Array, " tokens"], mask: Bool[Array, " tokens"], ids: Int[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """The log-ratio at a level: a token's own, or one of its sequence's, given to each of its tokens.

    token       log r_t             PPO, arXiv 1707.06347
    geometric   mean_t log r_t      GSPO, arXiv 2507.18071, equation 7
    sum         Σ_t log r_t         a trajectory's, Precup et al. 2000
    """
    match level:
        case "token":
            return log_ratios
        case "geometric":
            return mean_by_id(mask, log_ratios, ids)
        case "sum":
            return jnp.clip(sum_by_id(mask, log_ratios, ids), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def outside(x: Float[Array, "*shape"], low: float, high: float) -> Bool[Array, "*shape"]:
    """Where x is not within [low, high]."""
    return (x < low) | (x > high)
