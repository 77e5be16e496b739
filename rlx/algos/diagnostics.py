"""What the objective reports beside the loss, from arrays that the loss needs anyway. No second pass over the batch."""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.centering import Head
from rlx.algos.importance import outside
from rlx.algos.kl import kl
from rlx.algos.metrics import AGE_BINS, LENGTH_BINS, RATIO_BAND, Moments, binned_moments, pair, weight_moments
from rlx.algos.policy_gradient import PolicyLoss, Surrogate

Pairs = dict[str, tuple[Array, Array]]


def policy_pairs(
    mask: Bool[Array, " tokens"], entropy: Float[Array, " tokens"], logprobs: Float[Array, " tokens"]
) -> Pairs:
    """The policy on its own."""
    return {
        "policy/entropy": pair(mask, stop_gradient(entropy)),
        "policy/logprob_mean": pair(mask, stop_gradient(logprobs)),
    }


def offpolicy_pairs(
    mask: Bool[Array, " tokens"],
    logprobs: Float[Array, " tokens"],
    sampler: Float[Array, " tokens"],
    ratios: Float[Array, " tokens"],
    ages: Int[Array, " tokens"],
) -> Pairs:
    """Sampler against trainer; d = log q - log p.

    KL and effective sample size show how far the two are apart; neither shows the bias that is left
    (docs/experiments.md).
    """
    logprobs = stop_gradient(logprobs)
    return {
        "offpolicy/kl_k1": pair(mask, kl("k1", sampler, logprobs)),
        "offpolicy/kl_k2": pair(mask, kl("k2", sampler, logprobs)),
        "offpolicy/kl_k3": pair(mask, kl("k3", sampler, logprobs)),
        "offpolicy/logprob_gap_mean": pair(mask, jnp.abs(logprobs - sampler)),
        "offpolicy/ratio_mean": pair(mask, ratios),
        "offpolicy/ratio_outside_fraction": pair(mask, outside(ratios, *RATIO_BAND)),
        "offpolicy/age_mean": pair(mask, ages),
    }


def bound_pairs(
    rule: Surrogate, policy: PolicyLoss, keep: Bool[Array, " tokens"], mask: Bool[Array, " tokens"]
) -> Pairs:
    """How often a bound acted, by what it did: a weight cut at its cap, a token removed, a gradient clipped away."""
    score, drops = rule.form == "score", rule.beyond == "drop"
    never = jnp.zeros_like(policy.bounded)
    return {
        "offpolicy/truncated_fraction": pair(mask, policy.bounded if score and not drops else policy.truncated),
        "offpolicy/masked_fraction": pair(mask, ~keep | (policy.bounded if score and drops else never)),
        "policy/clipped_fraction": pair(mask, never if score else policy.bounded),
    }


def weight_sums(
    mask: Bool[Array, " tokens"],
    ratios: Float[Array, " tokens"],
    ages: Int[Array, " tokens"],
    lengths: Int[Array, " tokens"],
) -> dict[str, Moments]:
    """Moments of the behaviour weights p/q: overall, by age and by length of the sequence."""
    return {
        "offpolicy/ess": weight_moments(mask, ratios),
        "offpolicy/ess_age": binned_moments(mask, ratios, ages, AGE_BINS),
        "offpolicy/ess_length": binned_moments(mask, ratios, lengths, LENGTH_BINS),
    }


def centering_pairs(
    mask: Bool[Array, " tokens"],
    head: Head,
    drift: Float[Array, " tokens"],
    covariance: Float[Array, " tokens"],
    advantages: Float[Array, " tokens"],
) -> Pairs:
    """What was subtracted and what is left; the norms are those of `centering.norms`, times |A|."""
    size = jnp.abs(advantages)
    return {
        "centering/head_mass_sampler": pair(mask, head.sampler_mass),
        "centering/head_mass_trainer": pair(mask, head.trainer_mass),
        "centering/coefficient_l1": pair(mask, jnp.abs(head.coefficients).sum(-1)),
        "centering/truncated_fraction": pair(mask, head.truncated),
        "centering/kl_head": pair(mask, head.kl),
        "centering/drift_norm": pair(mask, size * drift),
        "centering/covariance_norm": pair(mask, size * covariance),
    }
