"""What `rlx plan` assumes beside the recipe itself."""

from __future__ import annotations

import dataclasses
from typing import Literal

LEAST_EFFICIENCY = 0.001  # below it hardly anything but a slip of the pen is meant
DeviceName = Literal["H100", "H200", "B200", "B300"]


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    device: DeviceName  # of trainer and engines
    sequence_tokens: int  # mean of a trained sequence, prompt included; 0 = learner.row_tokens
    efficiency: float  # share of a device's peak FLOP/s that its matrix products reach
