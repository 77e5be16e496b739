"""What a collection of graded groups looks like: rewards, lengths, endings, grading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlx.types import Group, StopReason

PASS = 1.0  # the reward of a pass


def rollout_scalars(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups `reward/` and `response/`, over everything collected, before any filter."""
    samples = [s for g in groups for s in g.samples]
    rewards = np.array([s.reward for s in samples])
    lengths = np.array([s.num_written for s in samples])
    stops = Counter(s.stop_reason for s in samples)
    flat = np.array([not g.has_signal for g in groups])
    means = np.array([g.rewards.mean() for g in groups])
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/pass_rate": (rewards >= PASS).mean(),
        "reward/no_signal_fraction": flat.mean(),
        "reward/all_zero_fraction": (flat & (means == 0)).mean(),
        "reward/all_one_fraction": (flat & (means == PASS)).mean(),
        "response/length_mean": lengths.mean(),
        "response/length_std": lengths.std(),
        "response/length_max": lengths.max(),
        "response/prompt_length_mean": np.mean([len(s.tokens) - s.num_written for s in samples]),
        "response/truncated_fraction": stops[StopReason.LENGTH] / len(samples),
    }
    values |= {f"response/stop_reason_{reason.value}": stops[reason] / len(samples) for reason in StopReason}
    for source in sorted({g.task.source for g in groups}):
        of_source = [s.reward >= PASS for g in groups if g.task.source == source for s in g.samples]
        values[f"reward/pass_rate_{source}"] = np.mean(of_source)
    return {name: float(value) for name, value in values.items()}


def grading_scalars(groups: Sequence[Group]) -> dict[str, float]:
    """How long the grading of these groups took."""
    seconds = [float(s.grade["seconds"]) for g in groups for s in g.samples]
    return {"grader/seconds_mean": float(np.mean(seconds)), "grader/seconds_max": float(np.max(seconds))}


def grading_outcomes(groups: Sequence[Group]) -> Counter[str]:
    """Samples by grading outcome: graded, timeout, error."""
    return Counter(str(s.grade["outcome"]) for g in groups for s in g.samples)
