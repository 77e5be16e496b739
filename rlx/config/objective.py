"""The objective of an update: what is maximised, how off-policy samples are weighted, how tokens are averaged.

Defaults are in `configs/base.py`; what does not go together is refused by `rlx.config.objective_checks`. Formulas are
in `rlx.algos`, an overview in docs/algorithms.md. q is the distribution that sampled a token, p the one being trained.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Advantage = Literal["group_mean", "group_std", "leave_one_out", "batch_whitened", "mean_normalised", "none", "gae"]
Loss = Literal["reinforce", "tis", "icepop", "ppo_clip", "ppo_dual_clip", "ppo_clip_tis", "cispo", "gspo", "dppo_tv"]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
Level = Literal["token", "geometric", "sum"]  # log-ratio of a token, its mean over the sequence, its sum over it
Estimator = Literal["k1", "k2", "k3"]


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """On-policy distillation: u = alpha * signal - lam * (log p - log reference) instead of a reward's advantage."""

    form: Literal["off", "sampled", "top_k", "full"]
    signal: Literal["teacher", "proxy"]  # log teacher | log expert - log base of a proxy (Proxy OPD)
    alpha: float
    lam: float
    calibration: Literal["constant", "entropy", "overlap"]  # of lam, per token
    calibration_floor: float  # lam is divided by no less than this
    filter: Literal["all", "rewarded", "agreeing"]  # OPD | OPD-FT | OPD-URM
    combine: Literal["weights", "vote"]  # of several signals
    weights: tuple[float, ...]  # one a signal


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    advantage: Advantage
    advantage_ddof: Literal[0, 1]
    advantage_eps: float
    discount: float
    gae_lambda: float

    loss: Loss
    importance_level: Level  # of tis and icepop
    tis_cap: float
    mask_low: float
    mask_high: float
    clip_low: float
    clip_high: float
    dual_clip: float
    cispo_low: float
    cispo_high: float
    tv_delta: float
    sequence_mask: Literal["off", "geometric", "sum"]
    sequence_mask_low: float
    sequence_mask_high: float
    use_rollout_logprobs: bool

    centering: Literal["off", "none", "tis", "mis"]  # score centering's weight f; "off" = not centred
    aggregation: Aggregation
    constant_length: float
    entropy_coefficient: float
    kl_coefficient: float
    kl_estimator: Estimator
    kl_placement: Literal["loss", "reward"]
    distill: DistillConfig

    @property
    def needs_head(self) -> bool:
        """The sampler's K likeliest tokens must come with every sampled token."""
        overlaps = self.distill.form != "off" and self.distill.calibration == "overlap"
        return self.centering != "off" or self.distill.form == "top_k" or overlaps

    @property
    def needs_reference(self) -> bool:
        """A frozen reference must score every trained token."""
        return self.kl_coefficient > 0 or (self.distill.form != "off" and self.distill.signal == "proxy")

    @property
    def penalises_rewards(self) -> bool:
        """The KL to the reference is subtracted from rewards."""
        return self.kl_coefficient > 0 and self.kl_placement == "reward"

    @property
    def needs_scoring_pass(self) -> bool:
        """The trainer's own log-probs are needed before the update, not only in its forward."""
        return self.kl_coefficient > 0
