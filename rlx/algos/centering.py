"""Score centering (arXiv 2609.20807): off-policy gradients without the drift towards the sampler.

Off policy E_q[A f(r) s] = E_q[A] · E_q[f(r) s] + Cov_q(A, f(r) s). The first term knows nothing of the reward, and its
second factor is zero only where f(r) = r. Subtracting Σ_v q_v f(r_v) s_v from every token's f(r_y) s_y removes it.

The sampler stores its K likeliest tokens H with their log-probs. Beyond them q is taken to be proportional to p, so one
number describes the tail; with K = V the form is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.importance import log_ratio

MASS_FLOOR = 1e-6  # of the probability left to the tail, under p and under q


class Head(NamedTuple):
    """What centering needs of one position's candidates; no field carries a gradient."""

    coefficients: Float[Array, "tokens K"]  # q_v f(r_v) - α p_v: minus these, log p_v is pushed by
    sampler_mass: Float[Array, " tokens"]  # Q = Σ_H q
    trainer_mass: Float[Array, " tokens"]  # P = Σ_H p
    tail_ratio: Float[Array, " tokens"]  # ρ: q_v = ρ p_v beyond the head
    truncated: Float[Array, " tokens"]  # mass of the head's q whose weight f a bound cut
    kl: Float[Array, " tokens"]  # KL(q ‖ p) of the head and the tail's total


def center(
    weight: Callable[[Float[Array, "..."]], tuple[Float[Array, "..."], Bool[Array, "..."]]],
    candidates: Float[Array, "tokens K"],
    sampler: Float[Array, "tokens K"],
) -> Head:
    """Coefficients of the score's mean under q, and what there is to see on the way; f is the loss's own weight.

        none   f(r) = 1                         arXiv 2609.20807
        tis    f(r) = min(r, C)                 arXiv 2609.20807
        mis    f(r) = r · 1[lo <= r <= hi]      arXiv 2609.20807

    ρ = max(1 - Q, 1e-6) / max(1 - P, 1e-6),  α = ρ f(1/ρ),  coefficient_v = q_v f(r_v) - α p_v.

    Args:
      weight: f, from ratios to (weights, where a bound cut them).
      candidates: log p of the K candidates; `sampler`: log q of them.
    """
    candidates = stop_gradient(candidates)
    p, q = jnp.exp(candidates), jnp.exp(sampler)
    trainer_mass, sampler_mass = p.sum(-1), q.sum(-1)
    tail_ratio = jnp.maximum(1 - sampler_mass, MASS_FLOOR) / jnp.maximum(1 - trainer_mass, MASS_FLOOR)
    ratio = jnp.exp(log_ratio(candidates, sampler))
    f, cut = weight(ratio)
    tail = tail_ratio * weight(1 / tail_ratio)[0]
    divergence = jnp.sum(jnp.where(q > 0, -q * log_ratio(candidates, sampler), 0), -1)
    return Head(
        coefficients=q * f - tail[:, None] * p,
        sampler_mass=sampler_mass,
        trainer_mass=trainer_mass,
        tail_ratio=tail_ratio,
        truncated=jnp.sum(jnp.where(cut, q, 0), -1),
        kl=divergence + (1 - sampler_mass) * jnp.log(tail_ratio),
    )


def centering_loss(
    head: Head, candidates: Float[Array, "tokens K"], advantages: Float[Array, " tokens"]
) -> Float[Array, " tokens"]:
    """A · Σ_H sg(q_v f(r_v) - α p_v) · log p_v: what the centred loss adds to -A · sg(f(r_y)) · log p_y."""
    return advantages * jnp.sum(head.coefficients * candidates, -1)


def norms(
    head: Head,
    candidates: Float[Array, "tokens K"],
    candidate_ids: Int[Array, "tokens K"],
    weights: Float[Array, " tokens"],
    logprobs: Float[Array, " tokens"],
    tokens: Int[Array, " tokens"],
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """(L1 norm of the drift that is subtracted, of the centred score that stays), in the space of the logits.

    A coefficient c_v on log p_v is the logit gradient c - (Σ c) p. With S the coefficients' sum, m = c - S p is the
    drift and f(r_y)(e_y - p) - m the centred score. Beyond the head both are proportional to p, so the norms over the
    whole vocabulary need no more than P and p_y. Per unit of advantage.
    """
    p, p_y = jnp.exp(stop_gradient(candidates)), jnp.exp(stop_gradient(logprobs))
    total = head.coefficients.sum(-1)
    mean = head.coefficients - total[:, None] * p
    tail_mass = jnp.maximum(1 - head.trainer_mass, 0)
    drift = jnp.abs(mean).sum(-1) + jnp.abs(total) * tail_mass

    hit = candidate_ids == tokens[:, None]
    in_head = hit.any(-1)
    score = weights[:, None] * (hit - p) - mean
    sampled = jnp.abs(weights * (1 - p_y) + total * p_y)  # of a sampled token beyond the head
    rest = jnp.where(in_head, tail_mass, jnp.maximum(tail_mass - p_y, 0))
    covariance = jnp.abs(score).sum(-1) + jnp.abs(total - weights) * rest + jnp.where(in_head, 0, sampled)
    return drift, covariance
