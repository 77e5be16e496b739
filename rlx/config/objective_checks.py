"""What an objective does not go with, each with its reason. docs/algorithms.md is written from these rules.

A rule concerns choices of the objective, written "key=value", or "key" for every value but "off". Where one of them is
chosen, `holds` must be true of (objective, rollout); else `key` is refused with its value and `demand`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from rlx.config.objective import ObjectiveConfig
from rlx.config.schema import RolloutConfig

CENTRED_LOSS = {"none": "reinforce", "tis": "tis", "mis": "icepop"}  # the loss that has centering's weight f
GROUP_RELATIVE = ("group_mean", "group_std", "leave_one_out", "mean_normalised", "gae")
OWN_WEIGHT = ("reinforce", "tis", "icepop")  # losses -A sg(f(p/q)) log p
PPO = ("loss=ppo_clip", "loss=ppo_dual_clip", "loss=ppo_clip_tis", "loss=gspo")
LEAST_LAM = 0.05  # of alpha: below, π_ref (φ⁺/φ)^(alpha/lam) is a point mass for every practical purpose
LARGEST_GSPO_CLIP = 0.1


class Rule(NamedTuple):
    concerns: tuple[str, ...]
    key: str
    holds: Callable[[ObjectiveConfig, RolloutConfig], bool]
    demand: str  # may name {objective.…} and {rollout.…}


def refusals(config: ObjectiveConfig, sampling: RolloutConfig) -> list[str]:
    """A line for every broken rule: the key, its value and the way out. Empty where all goes together."""
    broken = (rule for rule in RULES if active(rule, config) and not rule.holds(config, sampling))
    return [_line(rule, config, sampling) for rule in broken]


def active(rule: Rule, config: ObjectiveConfig) -> bool:
    """A choice that the rule concerns is made."""
    return any(_chosen(concern, config) for concern in rule.concerns)


def _chosen(concern: str, config: ObjectiveConfig) -> bool:
    key, _, value = concern.partition("=")
    chosen = attrgetter(key)(config)
    return chosen == value if value else chosen != "off"


def _line(rule: Rule, config: ObjectiveConfig, sampling: RolloutConfig) -> str:
    section, _, name = rule.key.partition(".")
    value = attrgetter(name)({"objective": config, "rollout": sampling}[section])
    return f"config.{rule.key} = {value!r}: {rule.demand.format(objective=config, rollout=sampling)}"


ADVANTAGES = (
    Rule(
        tuple(f"advantage={name}" for name in GROUP_RELATIVE),
        "rollout.group_size",
        lambda o, r: r.group_size >= 2 or (o.distill.form != "off" and o.distill.filter != "agreeing"),
        "config.objective.advantage = {objective.advantage!r} compares the samples of a group; set at least 2",
    ),
    Rule(
        ("advantage=group_std", "advantage=batch_whitened"),
        "objective.advantage_eps",
        lambda o, r: o.advantage_eps > 0,
        "a group whose rewards are all equal would be divided by 0; set it above 0, e.g. 1e-6",
    ),
    Rule(
        ("advantage=mean_normalised",),
        "objective.kl_placement",
        lambda o, r: o.kl_coefficient == 0 or o.kl_placement == "loss",
        "dividing by the mean reward needs rewards that are never negative, a KL penalty makes them so; set 'loss'",
    ),
    Rule(
        ("advantage=gae",),
        "objective.discount",
        lambda o, r: 0 <= o.discount <= 1,
        "must be in [0, 1]; 1 for a reward at the end",
    ),
    Rule(
        ("advantage=gae",),
        "objective.gae_lambda",
        lambda o, r: 0 <= o.gae_lambda <= 1,
        "must be in [0, 1]; 1 gives every token of a sample the same",
    ),
)

LOSSES = (
    Rule(
        ("loss",),
        "rollout.temperature",
        lambda o, r: r.temperature > 0,
        "greedy decoding has no probabilities to train on; set it above 0, e.g. 1.0",
    ),
    Rule(
        ("loss=tis", "loss=ppo_clip_tis"),
        "objective.tis_cap",
        lambda o, r: o.tis_cap >= 1,
        "below 1 it cuts the weight of tokens that are on policy; set at least 1, e.g. 2.0",
    ),
    Rule(
        ("loss=icepop",),
        "objective.mask_low",
        lambda o, r: 0 <= o.mask_low < 1,
        "must be in [0, 1), or tokens that are on policy are dropped; e.g. 0.5",
    ),
    Rule(
        ("loss=icepop",),
        "objective.mask_high",
        lambda o, r: o.mask_high > 1,
        "must be above 1, or tokens that are on policy are dropped; e.g. 5.0",
    ),
    Rule(
        PPO,
        "objective.clip_low",
        lambda o, r: 0 < o.clip_low <= 1,
        "the ratio is clipped at 1 - clip_low, which must be below 1 and not negative; set it in (0, 1]",
    ),
    Rule(
        PPO,
        "objective.clip_high",
        lambda o, r: o.clip_high > 0,
        "the ratio is clipped at 1 + clip_high, which must be above 1; set it above 0",
    ),
    Rule(
        ("loss=gspo",),
        "objective.clip_high",
        lambda o, r: o.clip_high <= LARGEST_GSPO_CLIP,
        "the mean log-ratio of a sequence hardly moves, so this never clips; the published bounds are clip_low = 3e-4 "
        "and clip_high = 4e-4, set at most 0.1",
    ),
    Rule(
        ("loss=gspo",),
        "objective.aggregation",
        lambda o, r: o.aggregation == "sequence_mean_token_mean",
        "gspo has one ratio a sequence and averages over sequences; set 'sequence_mean_token_mean'",
    ),
    Rule(
        ("loss=ppo_dual_clip",),
        "objective.dual_clip",
        lambda o, r: o.dual_clip > 1,
        "caps the ratio of tokens with a negative advantage and must be above 1; e.g. 3.0",
    ),
    Rule(
        ("loss=cispo",),
        "objective.cispo_low",
        lambda o, r: 0 <= o.cispo_low <= 1,
        "the weight's lower bound is absolute, in [0, 1]; e.g. 0.0",
    ),
    Rule(
        ("loss=cispo",),
        "objective.cispo_high",
        lambda o, r: o.cispo_high >= 1,
        "the weight's upper bound is absolute, at least 1; e.g. 5.0",
    ),
    Rule(
        ("loss=dppo_tv",),
        "objective.tv_delta",
        lambda o, r: 0 < o.tv_delta <= 1,
        "bounds a difference of probabilities, so it lies in (0, 1]; e.g. 0.2",
    ),
    Rule(
        ("importance_level=geometric", "importance_level=sum"),
        "objective.importance_level",
        lambda o, r: o.loss in ("tis", "icepop"),
        "config.objective.loss = {objective.loss!r} does not read it, only tis and icepop do; set 'token'",
    ),
    Rule(
        ("sequence_mask",),
        "objective.sequence_mask_low",
        lambda o, r: 0 <= o.sequence_mask_low < 1,
        "must be in [0, 1), or sequences that are on policy are dropped; e.g. 0.5",
    ),
    Rule(
        ("sequence_mask",),
        "objective.sequence_mask_high",
        lambda o, r: o.sequence_mask_high > 1,
        "must be above 1, or sequences that are on policy are dropped; e.g. 2.0",
    ),
    Rule(
        ("loss=reinforce", "loss=tis", "loss=icepop", "loss=dppo_tv"),
        "objective.use_rollout_logprobs",
        lambda o, r: not o.use_rollout_logprobs,
        "config.objective.loss = {objective.loss!r} has no old policy to replace; set False",
    ),
)

CENTERING = (
    Rule(
        ("centering",),
        "objective.loss",
        lambda o, r: o.loss == CENTRED_LOSS[o.centering],
        "config.objective.centering = {objective.centering!r} centres a loss of the same weight: 'none' goes with "
        "reinforce, 'tis' with tis, 'mis' with icepop; change one of the two, or set centering to 'off'",
    ),
    Rule(
        ("centering",),
        "objective.importance_level",
        lambda o, r: o.importance_level == "token",
        "score centering weighs tokens, not sequences; set 'token' or config.objective.centering to 'off'",
    ),
    *(
        Rule(
            ("centering",),
            f"rollout.{name}",
            lambda o, r, name=name, off=off: attrgetter(name)(r) == off,
            f"score centering needs tokens sampled from the whole distribution; set {off} or "
            "config.objective.centering to 'off'",
        )
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
    ),
    Rule(
        ("centering",),
        "rollout.head_size",
        lambda o, r: r.head_size >= 1,
        "config.objective.centering = {objective.centering!r} needs the sampler's likeliest tokens; set 128, or "
        "centering to 'off'",
    ),
)

REGULARISERS = (
    Rule(
        ("aggregation=sequence_mean_token_sum_norm",),
        "objective.constant_length",
        lambda o, r: o.constant_length > 0,
        "every sequence's sum is divided by it; set the longest response in tokens, {rollout.max_new_tokens}",
    ),
    Rule(
        ("loss",),
        "objective.entropy_coefficient",
        lambda o, r: o.entropy_coefficient >= 0,
        "a negative bonus drives the policy to determinism; set 0 or more",
    ),
    Rule(
        ("kl_estimator",),
        "objective.kl_coefficient",
        lambda o, r: o.kl_coefficient >= 0,
        "a negative coefficient drives the policy away from the reference; set 0 or more",
    ),
    Rule(
        ("kl_estimator=k1",),
        "objective.kl_placement",
        lambda o, r: o.kl_coefficient == 0 or o.kl_placement == "reward",
        "the gradient of k1 is the score, which is 0 on average: no penalty at all; set 'reward', or kl_estimator to "
        "'k2', whose gradient is that of the KL",
    ),
)

DISTILLATION = (
    Rule(
        ("distill.form",),
        "objective.distill.alpha",
        lambda o, r: o.distill.alpha > 0,
        "scales what is distilled; set it above 0, e.g. 1.0",
    ),
    Rule(
        ("distill.form",),
        "objective.distill.lam",
        lambda o, r: o.distill.lam >= LEAST_LAM * o.distill.alpha,
        "the optimum is the reference times (expert / base)^(alpha / lam): as lam goes to 0 it collapses to one token; "
        "1.08 to 1.57 are published for alpha = 1, set at least 0.05 alpha",
    ),
    Rule(
        ("distill.signal=teacher",),
        "objective.distill.lam",
        lambda o, r: o.distill.form == "off" or o.distill.alpha == o.distill.lam == 1,
        "a plain teacher is alpha = lam = 1, here alpha = {objective.distill.alpha}; set both to 1.0, or signal to "
        "'proxy'",
    ),
    Rule(
        ("distill.form",),
        "objective.loss",
        lambda o, r: o.loss in OWN_WEIGHT,
        "distillation takes the place of the advantage in reinforce, tis (with lag) or icepop; set one of them",
    ),
    Rule(
        ("distill.form=top_k", "distill.form=full"),
        "objective.centering",
        lambda o, r: o.centering == "off",
        "config.objective.distill.form = {objective.distill.form!r} sums over tokens and has no sampled score to "
        "centre; set 'off'",
    ),
    Rule(
        ("distill.form=top_k",),
        "rollout.head_size",
        lambda o, r: r.head_size >= 1,
        "config.objective.distill.form = 'top_k' sums over the sampler's likeliest tokens; set 128, or form to "
        "'sampled'",
    ),
    Rule(
        ("distill.form",),
        "objective.kl_coefficient",
        lambda o, r: o.kl_coefficient == 0,
        "distillation has a reference already, lam is its coefficient; set 0.0",
    ),
    Rule(
        ("advantage=none", "advantage=batch_whitened"),
        "rollout.filter_no_signal",
        lambda o, r: o.distill.form != "off" or not r.filter_no_signal,
        "config.objective.advantage = {objective.advantage!r} gives groups of equal rewards credit too; set False",
    ),
    Rule(
        ("distill.filter=all", "distill.filter=rewarded"),
        "rollout.filter_no_signal",
        lambda o, r: o.distill.form == "off" or not r.filter_no_signal,
        "distillation learns from groups of equal rewards too; set False",
    ),
    Rule(
        ("distill.filter=rewarded",),
        "objective.advantage",
        lambda o, r: o.distill.form == "off" or o.advantage == "none",
        "config.objective.distill.filter = 'rewarded' looks at the reward itself; set 'none'",
    ),
    Rule(
        ("distill.filter=agreeing",),
        "objective.advantage",
        lambda o, r: o.distill.form == "off" or o.advantage != "none",
        "config.objective.distill.filter = 'agreeing' compares with the sign of an advantage, a raw reward has "
        "one sign; set 'group_mean'",
    ),
    Rule(
        ("distill.filter=agreeing",),
        "objective.distill.weights",
        lambda o, r: o.distill.form == "off" or len(o.distill.weights) == 1,
        "config.objective.distill.filter = 'agreeing' compares with one expert; give one weight",
    ),
    Rule(
        ("distill.calibration=entropy", "distill.calibration=overlap"),
        "objective.distill.calibration_floor",
        lambda o, r: 0 < o.distill.calibration_floor <= 1,
        "lam is divided by a share in [floor, 1]; set the floor in (0, 1], e.g. 0.2",
    ),
    Rule(
        ("distill.calibration=overlap",),
        "rollout.head_size",
        lambda o, r: o.distill.form == "off" or r.head_size >= 1,
        "config.objective.distill.calibration = 'overlap' compares with the sampler's likeliest tokens; set 16, or "
        "calibration to 'constant'",
    ),
    Rule(
        ("distill.form",),
        "objective.distill.weights",
        lambda o, r: len(o.distill.weights) > 0 and all(w > 0 for w in o.distill.weights),
        "needs one weight above 0 for every signal, e.g. (1.0,)",
    ),
)

RULES: tuple[Rule, ...] = (*ADVANTAGES, *LOSSES, *CENTERING, *REGULARISERS, *DISTILLATION)
