"""The objective of an update: what is maximised, how off-policy samples are weighted, how tokens are averaged."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    advantage: Literal["group_mean", "group_std", "leave_one_out", "batch_whitened", "mean_normalised", "none"]
    loss: Literal["reinforce", "tis", "icepop", "ppo_clip", "ppo_dual_clip", "ppo_clip_tis", "cispo", "gspo", "dppo_tv"]
    aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ]
    centering: Literal["off", "none", "tis", "mis"]  # score centering's weight f; "off" = not centred
    tis_cap: float
    entropy_coefficient: float
