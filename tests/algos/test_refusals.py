"""Every rule refuses something, the base configuration nothing, and each refusal says key, value and way out."""

import dataclasses

import pytest

from configs.base import get_config
from rlx.config.objective_checks import RULES, active, refusals
from rlx.config.schema import RolloutConfig
from tests.oracle_adapter import base_objective

ROLLOUT = RolloutConfig(**get_config().rollout.to_dict())
GSPO = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"}
CENTRED = {"loss": "tis", "centering": "tis"}
SAMPLED = {"loss": "tis", "distill": {"form": "sampled"}}
OPEN = {"filter_no_signal": False}


def distilled(**changes):
    return {"loss": "tis", "distill": {"form": "sampled", **changes}}


# What a user wrote, objective and rollout; the key that is refused; a part of the way out.
WRONG = [
    ({"advantage": "leave_one_out"}, {"group_size": 1}, "rollout.group_size", "at least 2"),
    ({"advantage": "group_std", "advantage_eps": 0.0}, {}, "objective.advantage_eps", "1e-6"),
    (
        {"advantage": "mean_normalised", "kl_coefficient": 0.1, "kl_placement": "reward"},
        {},
        "objective.kl_placement",
        "'loss'",
    ),
    ({"advantage": "batch_whitened"}, {"filter_no_signal": True}, "rollout.filter_no_signal", "set False"),
    ({"advantage": "gae", "discount": 1.5}, {}, "objective.discount", "[0, 1]"),
    ({"advantage": "gae", "gae_lambda": -0.1}, {}, "objective.gae_lambda", "[0, 1]"),
    ({}, {"temperature": 0.0}, "rollout.temperature", "above 0"),
    ({"loss": "ppo_clip_tis", "tis_cap": 0.5}, {}, "objective.tis_cap", "at least 1"),
    ({"loss": "icepop", "mask_low": 1.2}, {}, "objective.mask_low", "[0, 1)"),
    ({"loss": "icepop", "mask_high": 0.9}, {}, "objective.mask_high", "above 1"),
    ({"loss": "ppo_clip", "clip_low": 1.2}, {}, "objective.clip_low", "(0, 1]"),
    ({"loss": "ppo_clip", "clip_high": 0.0}, {}, "objective.clip_high", "above 0"),
    ({**GSPO, "clip_high": 0.28}, {}, "objective.clip_high", "4e-4"),
    ({**GSPO, "aggregation": "token_mean"}, {}, "objective.aggregation", "'sequence_mean_token_mean'"),
    ({"loss": "ppo_dual_clip", "dual_clip": 1.0}, {}, "objective.dual_clip", "above 1"),
    ({"loss": "cispo", "cispo_low": 1.5}, {}, "objective.cispo_low", "[0, 1]"),
    ({"loss": "cispo", "cispo_high": 0.5}, {}, "objective.cispo_high", "at least 1"),
    ({"loss": "dppo_tv", "tv_delta": 0.0}, {}, "objective.tv_delta", "(0, 1]"),
    ({"loss": "cispo", "importance_level": "sum"}, {}, "objective.importance_level", "'token'"),
    ({"sequence_mask": "sum", "sequence_mask_low": 1.5}, {}, "objective.sequence_mask_low", "[0, 1)"),
    ({"sequence_mask": "sum", "sequence_mask_high": 0.9}, {}, "objective.sequence_mask_high", "above 1"),
    ({"loss": "tis", "use_rollout_logprobs": True}, {}, "objective.use_rollout_logprobs", "set False"),
    ({"loss": "ppo_clip", "centering": "tis"}, {}, "objective.loss", "'tis' with tis"),
    ({**CENTRED, "importance_level": "geometric"}, {}, "objective.importance_level", "set 'token'"),
    (CENTRED, {"top_p": 0.9}, "rollout.top_p", "set 1.0"),
    (CENTRED, {"top_k": 50}, "rollout.top_k", "set 0"),
    (CENTRED, {"min_p": 0.05}, "rollout.min_p", "set 0.0"),
    (CENTRED, {"head_size": 0}, "rollout.head_size", "config.objective.centering = 'tis'"),
    (
        {"aggregation": "sequence_mean_token_sum_norm", "constant_length": 0.0},
        {},
        "objective.constant_length",
        "response in tokens, 64",
    ),
    ({"entropy_coefficient": -0.1}, {}, "objective.entropy_coefficient", "0 or more"),
    ({"kl_coefficient": -0.1}, {}, "objective.kl_coefficient", "0 or more"),
    ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, {}, "objective.kl_placement", "'k2'"),
    (distilled(alpha=0.0), OPEN, "objective.distill.alpha", "above 0"),
    (distilled(lam=0.0), OPEN, "objective.distill.lam", "collapses"),
    (distilled(lam=-1.0), OPEN, "objective.distill.lam", "collapses"),
    (distilled(signal="teacher", lam=1.5), OPEN, "objective.distill.lam", "alpha = lam = 1"),
    ({**SAMPLED, "loss": "ppo_clip"}, OPEN, "objective.loss", "reinforce"),
    ({**distilled(form="full"), "centering": "tis"}, OPEN, "objective.centering", "'full'"),
    (distilled(form="top_k"), {**OPEN, "head_size": 0}, "rollout.head_size", "128"),
    ({**SAMPLED, "kl_coefficient": 0.1}, OPEN, "objective.kl_coefficient", "lam is its coefficient"),
    (SAMPLED, {}, "rollout.filter_no_signal", "set False"),
    (distilled(filter="rewarded"), OPEN, "objective.advantage", "set 'none'"),
    ({**distilled(filter="agreeing"), "advantage": "none"}, OPEN, "objective.advantage", "'group_mean'"),
    (distilled(filter="agreeing", weights=(1.0, 1.0)), OPEN, "objective.distill.weights", "one weight"),
    (distilled(calibration="entropy", calibration_floor=0.0), OPEN, "objective.distill.calibration_floor", "(0, 1]"),
    (distilled(calibration="overlap"), {**OPEN, "head_size": 0}, "rollout.head_size", "'overlap'"),
    (distilled(weights=(1.0, -1.0)), OPEN, "objective.distill.weights", "above 0"),
]


def made(objective, rollout):
    return base_objective(**objective), dataclasses.replace(ROLLOUT, **rollout)


@pytest.mark.parametrize("objective, rollout, key, way_out", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_makes_no_sense_is_refused(objective, rollout, key, way_out):
    config, sampling = made(objective, rollout)
    lines = [line for line in refusals(config, sampling) if line.startswith(f"config.{key} = ") and way_out in line]
    assert len(lines) == 1, refusals(config, sampling)


def test_every_rule_has_an_example():
    broken = set()
    for objective, rollout, *_ in WRONG:
        config, sampling = made(objective, rollout)
        broken |= {rule for rule in RULES if active(rule, config) and not rule.holds(config, sampling)}
    assert broken == set(RULES)


@pytest.mark.parametrize(
    "objective, rollout",
    [
        (CENTRED, {}),
        (GSPO, {}),
        (SAMPLED, OPEN),
        ({**SAMPLED, "centering": "tis"}, OPEN),
        (distilled(signal="teacher", lam=1.0), OPEN),
        ({"loss": "tis", "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}, {}),
        ({"loss": "ppo_clip_tis", "use_rollout_logprobs": True}, {}),
        ({"loss": "tis"}, {"top_p": 0.9, "head_size": 0}),
    ],
)
def test_what_goes_together_is_not_refused(objective, rollout):
    assert refusals(*made(objective, rollout)) == []
