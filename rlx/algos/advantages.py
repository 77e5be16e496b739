"""Advantages: rewards of a batch of samples to the credit each gets. [N] samples, groups of one task instance.

Groups may be of any size; the group ids of `advantages`, `token_advantages` and `no_signal_groups` are any integers.
Samples with `valid` False are padding: they count nowhere, may hold anything, and get 0. The formulas themselves, from
`group_mean` to `mean_normalised`, take ids in [0, N) and finite rewards.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.algos.masked import dense_ids, mean_by_id, sum_by_id
from rlx.config.objective import ObjectiveConfig


def advantages(
    config: ObjectiveConfig,
    rewards: Float[Array, " samples"],
    groups: Int[Array, " samples"],
    valid: Bool[Array, " samples"],
) -> Float[Array, " samples"]:
    """The advantage of every sample by `config.advantage`; mean and std are those of the sample's group.

        group_mean        R - mean                                 Dr. GRPO, arXiv 2503.20783
        group_std         (R - mean) / (std + eps)                 GRPO, arXiv 2402.03300, section 4.1.2
        leave_one_out     R - mean of the others                   RLOO, arXiv 2402.14740
        batch_whitened    (R - mean) / (std + eps) of the batch    REINFORCE++, arXiv 2501.03262
        mean_normalised   (R - mean) / mean                        MaxRL, arXiv 2602.02710
        none              R                                        Williams 1992
        gae               Σ (γλ)^k δ_{t+k}, V = the group's mean   GAE, arXiv 1506.02438

    Raises:
      ValueError: for `gae`, which gives one advantage a token: use `token_advantages`.
    """
    rewards, groups = jnp.where(valid, rewards, 0), dense_ids(valid, groups)
    ddof, eps = config.advantage_ddof, config.advantage_eps
    match config.advantage:
        case "group_mean":
            result = group_mean(rewards, groups, valid)
        case "group_std":
            result = group_std(rewards, groups, valid, ddof, eps)
        case "leave_one_out":
            result = leave_one_out(rewards, groups, valid)
        case "batch_whitened":
            result = group_std(rewards, jnp.zeros_like(groups), valid, ddof, eps)
        case "mean_normalised":
            result = mean_normalised(rewards, groups, valid)
        case "none":
            result = rewards
        case "gae":
            raise ValueError("objective.advantage = 'gae' has one advantage a token: call token_advantages instead")
    return jnp.where(valid, result, 0)


def group_mean(
    rewards: Float[Array, " samples"], groups: Int[Array, " samples"], valid: Bool[Array, " samples"]
) -> Float[Array, " samples"]:
    """R - mean of its group."""
    return rewards - mean_by_id(valid, rewards, groups)


def group_std(
    rewards: Float[Array, " samples"],
    groups: Int[Array, " samples"],
    valid: Bool[Array, " samples"],
    ddof: Literal[0, 1],
    eps: float,
) -> Float[Array, " samples"]:
    """(R - mean) / (std + eps) of its group; std is 0 where n <= ddof. One group of all samples: batch whitening."""
    centred = group_mean(rewards, groups, valid)
    count = sum_by_id(valid, jnp.ones_like(rewards), groups)
    variance = sum_by_id(valid, centred**2, groups) / jnp.maximum(count - ddof, 1)
    return centred / (jnp.sqrt(jnp.where(count > ddof, variance, 0)) + eps)


def leave_one_out(
    rewards: Float[Array, " samples"], groups: Int[Array, " samples"], valid: Bool[Array, " samples"]
) -> Float[Array, " samples"]:
    """R - mean of the others of its group, which is G / (G - 1) of group_mean; alone: 0."""
    count = sum_by_id(valid, jnp.ones_like(rewards), groups)
    others = (sum_by_id(valid, rewards, groups) - rewards) / jnp.maximum(count - 1, 1)
    return jnp.where(count > 1, rewards - others, 0)


def mean_normalised(
    rewards: Float[Array, " samples"], groups: Int[Array, " samples"], valid: Bool[Array, " samples"]
) -> Float[Array, " samples"]:
    """(R - mean) / mean for rewards that are not negative; 0 where nobody is rewarded."""
    mean = mean_by_id(valid, rewards, groups)
    return jnp.where(mean > 0, (rewards - mean) / jnp.where(mean > 0, mean, 1), 0)


def gae(
    rewards: Float[Array, " tokens"],
    values: Float[Array, " tokens"],
    mask: Bool[Array, " tokens"],
    ids: Int[Array, " tokens"],
    discount: float,
    gae_lambda: float,
) -> Float[Array, " tokens"]:
    """Generalised advantage estimation (arXiv 1506.02438, equations 11 and 16), from the last token to the first.

    δ_t = r_t + γ V_{t+1} - V_t,  A_t = δ_t + γ λ A_{t+1}, where t + 1 is the next unmasked token of the same id; beyond
    an id's last one both are 0. Masked tokens are passed over and get 0.
    """
    rewards, values = jnp.where(mask, rewards, 0), jnp.where(mask, values, 0)

    def step(carry, now):
        reward, value, counts, episode = now
        same = episode == carry[0]
        next_value, next_advantage = jnp.where(same, carry[1], 0), jnp.where(same, carry[2], 0)
        advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
        kept = tuple(jnp.where(counts, new, old) for new, old in zip((episode, value, advantage), carry))
        return kept, jnp.where(counts, advantage, 0)

    start = (ids[-1], jnp.zeros_like(values[0]), jnp.zeros_like(values[0]))
    return jax.lax.scan(step, start, (rewards, values, mask, ids), reverse=True)[1]


def token_advantages(
    config: ObjectiveConfig,
    rewards: Float[Array, " samples"],
    groups: Int[Array, " samples"],
    valid: Bool[Array, " samples"],
    mask: Bool[Array, " tokens"],
    samples: Int[Array, " tokens"],
) -> Float[Array, " tokens"]:
    """The advantage of every token; `samples` is each token's index into `rewards`, a sample's tokens are in order.

    Every method but `gae` gives a sample's advantage to each of its tokens. `gae` pays the reward at the sample's last
    trained token; its critic is the mean reward of the group, so with γ = λ = 1 it is group_mean, and with γλ < 1
    credit decays with the distance from the end.
    """
    index = jnp.where(mask, samples, 0)
    if config.advantage != "gae":
        return jnp.where(mask, advantages(config, rewards, groups, valid)[index], 0)
    rewards, groups = jnp.where(valid, rewards, 0), dense_ids(valid, groups)
    values = mean_by_id(valid, rewards, groups)[index]
    position = jnp.arange(mask.shape[0])
    last = jax.ops.segment_max(jnp.where(mask, position, -1), index, num_segments=rewards.shape[0])
    paid = jnp.where(mask & (position == last[index]), rewards[index], 0)
    return gae(paid, values, mask & valid[index], samples, config.discount, config.gae_lambda)


class NoSignal(NamedTuple):
    """Numbers of groups, int32 []: whose rewards are all equal, of these all 0 and all 1, and of all groups."""

    equal: Int[Array, ""]
    all_zero: Int[Array, ""]
    all_one: Int[Array, ""]
    groups: Int[Array, ""]

    @property
    def fraction(self) -> Float[Array, ""]:
        """Share of the non-empty groups that carry no signal; a group of one carries none."""
        return self.equal / jnp.maximum(self.groups, 1)


def no_signal_groups(
    rewards: Float[Array, " samples"], groups: Int[Array, " samples"], valid: Bool[Array, " samples"]
) -> NoSignal:
    """How many groups have rewards that are all equal, so that every group-relative advantage is 0."""
    index = dense_ids(valid, groups)
    size = rewards.shape[0]
    high = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), index, num_segments=size)
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), index, num_segments=size)
    there = high >= low
    equal = there & (high == low)
    return NoSignal(equal.sum(), (equal & (high == 0)).sum(), (equal & (high == 1)).sum(), there.sum())
