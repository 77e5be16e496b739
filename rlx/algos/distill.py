"""On-policy distillation (OPD) and Proxy OPD (arXiv 2607.11505): credit per token from frozen models, not rewards.

    u = α · signal - λ · (log π - log π_ref)

`signal` is log teacher (OPD, where nothing is subtracted for a reference), or log φ⁺ - log φ: what an expert learned
over its own base, transferred to a policy that starts at π_ref. Per state the optimum is π ∝ π_ref · exp(α signal / λ).
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from rlx.config.objective import DistillConfig


def utility(
    config: DistillConfig,
    logprobs: Float[Array, "*shape"],
    signal: Float[Array, "*shape"],
    reference: Float[Array, "*shape"],
    lam: Float[Array, "..."],
) -> Float[Array, "*shape"]:
    """u = α signal - λ (log π - log reference); reference 0 for a plain teacher.

    teacher   u = log teacher - log π                                 OPD, arXiv 2306.13649
    proxy     u = α (log φ⁺ - log φ) - λ (log π - log π_ref)          Proxy OPD, arXiv 2607.11505
    """
    return config.alpha * signal - lam * (logprobs - reference)


def utility_loss(
    form: Literal["off", "sampled", "top_k", "full"],
    sampled: Float[Array, " tokens"],
    candidates: Float[Array, "tokens K"],
    utilities: Float[Array, "tokens K"],
    known: Bool[Array, "tokens K"],
    in_head: Bool[Array, " tokens"],
) -> Float[Array, " tokens"]:
    """The loss whose expected gradient is that of -Σ_a π(a) u(a), summed over more or fewer tokens.

    sampled   -sg(u_y) log π_y                                      Proxy OPD, arXiv 2607.11505
    top_k     -Σ_H sg(π u) log π - 1[y ∉ H] sg(u_y) log π_y         Proxy OPD, arXiv 2607.11505
    full      -Σ_V π u, differentiated exactly                      Proxy OPD, arXiv 2607.11505

    Args:
      sampled: the sampled token's loss, with its importance weight.
      candidates: log π of the K candidates H, chosen without looking at the sampled token; K = V for `full`.
      known: candidates that the proxy's vocabulary has.
      in_head: the sampled token is a candidate.
    """
    match form:
        case "off" | "sampled":
            return sampled
        case "top_k":
            pushed = stop_gradient(jnp.exp(candidates) * utilities)
            return -jnp.sum(jnp.where(known, pushed * candidates, 0), -1) + jnp.where(in_head, 0, sampled)
        case "full":
            return -jnp.sum(jnp.where(known, jnp.exp(candidates) * utilities, 0), -1)


def calibrated_lam(
    config: DistillConfig, entropy: Float[Array, " tokens"], overlap: Float[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """λ / max(x, floor): the less a token is to move, the larger.

    constant   x = 1                                                 arXiv 2607.11505
    entropy    x = 1 - e^-H: near 0 where the policy is certain      an option of this project
    overlap    x = |top-K(proxy) ∩ top-K(target)| / K                an option of this project
    """
    match config.calibration:
        case "constant":
            return jnp.full_like(entropy, config.lam)
        case "entropy":
            x = -jnp.expm1(-stop_gradient(entropy))
        case "overlap":
            x = overlap
    return config.lam / jnp.maximum(x, config.calibration_floor)


def kept(
    config: DistillConfig,
    advantages: Float[Array, " tokens"],
    teacher: Float[Array, " tokens"],
    logprobs: Float[Array, " tokens"],
) -> Bool[Array, " tokens"]:
    """Tokens that a filter on rewards keeps; `teacher` is log φ⁺ of the token.

    all        every token                                        OPD, arXiv 2306.13649
    rewarded   R > 0                                              OPD-FT, arXiv 2607.11505
    agreeing   sign(log φ⁺ - log π) · sign(A) >= 0                OPD-URM, arXiv 2607.11505
    """
    match config.filter:
        case "all":
            return jnp.ones(advantages.shape, bool)
        case "rewarded":
            return advantages > 0
        case "agreeing":
            return jnp.sign(teacher - stop_gradient(logprobs)) * jnp.sign(advantages) >= 0


def combine_signals(config: DistillConfig, signals: Float[Array, " signals *shape"]) -> Float[Array, "*shape"]:
    """Several signals as one.

        weights   Σ_i w_i Δ_i                                          an option of this project
        vote      the same where Σ_i w_i sign(Δ_i) has its sign        an option of this project

    Raises:
      ValueError: unless `config.weights` has one weight a signal.
    """
    if len(config.weights) != signals.shape[0]:
        raise ValueError(
            f"objective.distill.weights has {len(config.weights)} entries for {signals.shape[0]} signals; give one each"
        )
    weights = jnp.asarray(config.weights, signals.dtype).reshape(-1, *([1] * (signals.ndim - 1)))
    total = jnp.sum(weights * signals, 0)
    if config.combine == "weights":
        return total
    votes = jnp.sum(weights * jnp.sign(signals), 0)
    return jnp.where(votes * total > 0, total, 0)


def top_k_overlap(a: Int[Array, "tokens K"], b: Int[Array, "tokens K"]) -> Float[Array, " tokens"]:
    """|A ∩ B| / K of two lists of K distinct ids."""
    return (a[:, :, None] == b[:, None, :]).any(-1).mean(-1)
