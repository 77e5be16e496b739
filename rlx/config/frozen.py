"""Frozen policies that score the samples of an update, and what tells that a run has collapsed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    """What `objective.distill` learns from, one a weight. The reference is the policy that the run begins with."""

    teachers: tuple[str, ...]  # distill.signal = "teacher": Hugging Face directories, or PEFT adapters of one
    signals: tuple[str, ...]  # distill.signal = "proxy": directories that `rlx signal create` has written
    cache: str  # a file of scores by content, "" = none


@dataclasses.dataclass(frozen=True)
class CollapseConfig:
    """Bounds that stop a run, 0 = off. Loss and gradient norm are not among them: they look healthy at every lam."""

    reward_drop: float  # of the held-out pass rate, below that before the first update
    entropy_low: float  # nats
    entropy_growth: float  # times that of the first update
    repetition: float  # share of 4-grams that their response has had before
    length_factor: float  # times the mean length of the first update, or that length over this
    patience: int  # updates in a row; a drop of the held-out pass rate stops at once

    @property
    def watches(self) -> bool:
        return any((self.reward_drop, self.entropy_low, self.entropy_growth, self.repetition, self.length_factor))
