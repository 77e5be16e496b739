"""The token losses: one record of what is compared with which bounds, one function that applies it.

Every loss of the family is -A · w · (something whose gradient is ∇ log p), where w is a ratio kept within bounds:

    score form:  -A · sg(w) · log p    reinforce, tis, icepop, cispo: a token's gradient is its bounded weight's
    ratio form:  -A · w                ppo, gspo, dppo: the ratio itself carries the gradient, and none where clipped
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.importance import at_level, log_ratio, outside
from rlx.config.objective import Level, ObjectiveConfig


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """A token loss. The defaults are plain importance sampling: -A · sg(p/q) · log p."""

    form: Literal["score", "ratio"] = "score"
    anchor: Literal["sampler", "old"] = "sampler"  # the ratio's denominator
    level: Level = "token"
    inside: Literal["one", "ratio"] = "ratio"  # w within the bounds
    compared: Literal["ratio", "difference"] = "ratio"  # what the bounds are on: p / anchor | p - anchor
    low: float = 0.0
    high: float = math.inf
    beyond: Literal["clip", "drop"] = "clip"  # w outside the bounds: the bound | 0
    one_sided: bool = False  # a bound counts only where the advantage pushes across it
    negative_cap: float = math.inf  # w's cap where the advantage is negative
    behaviour_cap: float = math.inf  # times sg(min(old / q, cap)); inf = not at all


def surrogate(config: ObjectiveConfig) -> Surrogate:
    """The record of `config.loss`; r = p / old.

    reinforce       -A log p                                   Williams 1992
    tis             -A sg(min(p/q, C)) log p                   truncated importance sampling, Ionides 2008
    icepop          -A sg(p/q · 1[lo <= p/q <= hi]) log p      IcePop, arXiv 2510.18855
    cispo           -A sg(clip(r, lo, hi)) log p               MiniMax-M1, arXiv 2506.13585
    ppo_clip        -min(A r, A clip(r, 1 - lo, 1 + hi))       PPO, arXiv 1707.06347; lo != hi: DAPO, 2503.14476
    ppo_dual_clip   ppo_clip with r <= c where A < 0           arXiv 1912.09729
    ppo_clip_tis    ppo_clip · sg(min(old/q, C))               decoupled PPO, arXiv 2110.00641
    gspo            ppo_clip with r = exp(mean_t log r_t)      GSPO, arXiv 2507.18071
    dppo_tv         -A p/q, 0 where A (p - q) > |A| δ          DPPO, arXiv 2602.04879
    """
    c = config
    ppo = Surrogate("ratio", anchor="old", low=1 - c.clip_low, high=1 + c.clip_high, one_sided=True)
    match c.loss:
        case "reinforce":
            return Surrogate(inside="one")
        case "tis":
            return Surrogate(level=c.importance_level, high=c.tis_cap)
        case "icepop":
            return Surrogate(level=c.importance_level, low=c.mask_low, high=c.mask_high, beyond="drop")
        case "cispo":
            return Surrogate(anchor="old", low=c.cispo_low, high=c.cispo_high)
        case "ppo_clip":
            return ppo
        case "ppo_dual_clip":
            return dataclasses.replace(ppo, negative_cap=c.dual_clip)
        case "ppo_clip_tis":
            return dataclasses.replace(ppo, behaviour_cap=c.tis_cap)
        case "gspo":
            return dataclasses.replace(ppo, level="geometric")
        case "dppo_tv":
            inside = Surrogate("ratio", compared="difference", low=-c.tv_delta, high=c.tv_delta)
            return dataclasses.replace(inside, beyond="drop", one_sided=True)


def bounded(
    rule: Surrogate,
    ratio: Float[Array, "*shape"],
    compared: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"] | float = 0.0,
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """(w, where a bound changed it)."""
    above, below = compared > rule.high, compared < rule.low
    if rule.one_sided:
        above, below = above & (advantages > 0), below & (advantages < 0)
    inside = jnp.ones_like(ratio) if rule.inside == "one" else ratio
    if rule.beyond == "drop":
        weight = jnp.where(above | below, 0, inside)
    else:
        weight = jnp.where(above, rule.high, jnp.where(below, rule.low, inside))
    capped = (weight > rule.negative_cap) & (advantages < 0)
    return jnp.where(capped, rule.negative_cap, weight), above | below | capped


class PolicyLoss(NamedTuple):
    """Per token: the loss, its weight w, where a bound changed w, where the behaviour weight was cut."""

    loss: Float[Array, " tokens"]
    weight: Float[Array, " tokens"]
    bounded: Bool[Array, " tokens"]
    truncated: Bool[Array, " tokens"]


def policy_loss(
    rule: Surrogate,
    logprobs: Float[Array, " tokens"],
    sampler: Float[Array, " tokens"],
    old: Float[Array, " tokens"],
    advantages: Float[Array, " tokens"],
    mask: Bool[Array, " tokens"],
    ids: Int[Array, " tokens"],
) -> PolicyLoss:
    """The loss of every token by `rule`; arguments are finite everywhere, `ids` are dense sequence ids."""
    anchor = sampler if rule.anchor == "sampler" else old
    ratio = jnp.exp(at_level(rule.level, log_ratio(logprobs, anchor), mask, ids))
    compared = ratio if rule.compared == "ratio" else jnp.exp(logprobs) - jnp.exp(anchor)
    weight, changed = bounded(rule, ratio, compared, advantages)
    carried = stop_gradient(weight) * logprobs if rule.form == "score" else weight
    behaviour, cut = behaviour_weight(rule, old, sampler)
    return PolicyLoss(-advantages * behaviour * carried, stop_gradient(weight * behaviour), changed, cut)


def behaviour_weight(
    rule: Surrogate, old: Float[Array, " tokens"], sampler: Float[Array, " tokens"]
) -> tuple[Float[Array, " tokens"], Bool[Array, " tokens"]]:
    """(sg(min(old / q, C)), where it was cut); 1 where C is infinite."""
    if math.isinf(rule.behaviour_cap):
        return jnp.ones_like(old), jnp.zeros(old.shape, bool)
    ratio = stop_gradient(jnp.exp(log_ratio(old, sampler)))
    return jnp.minimum(ratio, rule.behaviour_cap), ratio > rule.behaviour_cap


def sequence_keep(
    config: ObjectiveConfig,
    log_ratios: Float[Array, " tokens"],
    mask: Bool[Array, " tokens"],
    ids: Int[Array, " tokens"],
) -> Bool[Array, " tokens"]:
    """Tokens whose sequence's p/q ratio lies within the bounds; all of them where `sequence_mask` is off.

    geometric   keep where exp(mean_t log r_t) in [lo, hi]    as MIS, by sequence
    sum         keep where exp(Σ_t log r_t) in [lo, hi]       as MIS, by sequence
    """
    if config.sequence_mask == "off":
        return jnp.ones_like(mask)
    ratio = jnp.exp(at_level(config.sequence_mask, log_ratios, mask, ids))
    return ~outside(ratio, config.sequence_mask_low, config.sequence_mask_high)
