"""What a collection of graded groups looks like: rewards, lengths, endings, grading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from rlx.rollout.fates import graded
from rlx.types import Group, StopReason

PASS = 1.0  # the reward of a pass
NGRAM = 4  # tokens that are looked for again


def rollout_scalars(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups `reward/` and `response/`, over everything collected, before any filter.

    Rewards are those of samples with a verdict; where no grading succeeded there are no rewards to report.
    """
    samples = [s for g in groups for s in g.samples]
    lengths = np.array([s.num_written for s in samples])
    stops = Counter(s.stop_reason for s in samples)
    values = {
        "response/length_mean": lengths.mean(),
        "response/length_std": lengths.std(),
        "response/length_max": lengths.max(),
        "response/prompt_length_mean": np.mean([len(s.tokens) - s.num_written for s in samples]),
        "response/repetition_fraction": np.mean([repetition(s.tokens[s.mask]) for s in samples]),
        "response/truncated_fraction": stops[StopReason.LENGTH] / len(samples),
    }
    values |= {f"response/stop_reason_{reason.value}": stops[reason] / len(samples) for reason in StopReason}
    values |= _reward_scalars([g for g in map(graded, groups) if g.samples])
    return {name: float(value) for name, value in values.items()}


def repetition(written: Int[np.ndarray, " tokens"]) -> float:
    """Share of the 4-grams of a response that it has had before; 0 where it is shorter."""
    if len(written) < NGRAM:
        return 0.0
    ids = written.tolist()  # a set of tuples takes a tenth of the time of sorted arrays, short or long
    grams = list(zip(*(ids[i:] for i in range(NGRAM))))
    return 1 - len(set(grams)) / len(grams)


def _reward_scalars(groups: Sequence[Group]) -> dict[str, float]:
    if not groups:
        return {}
    rewards = np.concatenate([g.rewards for g in groups])
    flat = np.array([not g.has_signal for g in groups])
    means = np.array([g.rewards.mean() for g in groups])
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/pass_rate": (rewards >= PASS).mean(),
        "reward/no_signal_fraction": flat.mean(),
        "reward/all_zero_fraction": (flat & (means == 0)).mean(),
        "reward/all_one_fraction": (flat & (means == PASS)).mean(),
    }
    for source in sorted({g.task.source for g in groups}):
        of_source = np.concatenate([g.rewards for g in groups if g.task.source == source])
        values[f"reward/pass_rate_{source}"] = (of_source >= PASS).mean()
    return values


def grading_scalars(groups: Sequence[Group]) -> dict[str, float]:
    """How long the grading of these groups took."""
    seconds = [float(s.grade["seconds"]) for g in groups for s in g.samples]
    return {"grader/seconds_mean": float(np.mean(seconds)), "grader/seconds_max": float(np.max(seconds))}


def grading_outcomes(groups: Sequence[Group]) -> Counter[str]:
    """Samples by grading outcome: graded, timeout, error."""
    return Counter(str(s.grade["outcome"]) for g in groups for s in g.samples)
