"""Graded groups to the sequences of an update: which samples are trained on, with which advantage and age."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from rlx.data.packing import Trajectory
from rlx.envs.grading import Outcome
from rlx.types import Group, Sample, StopReason


def graded(group: Group) -> Group:
    """The group without samples whose grading failed: they say nothing about the policy."""
    return dataclasses.replace(group, samples=tuple(s for s in group.samples if s.grade["outcome"] == Outcome.GRADED))


def fates(group: Group, *, filter_no_signal: bool, mask_truncated: bool) -> dict[str, list[Sample]]:
    """The samples of a group by the bin of the ledger they go to; the group itself counts in the first.

    "buffered" are trained on; "no_signal": rewards all equal; "masked": cut by a length limit; failed: no verdict.
    """
    has_signal = graded(group).has_signal or not filter_no_signal
    bins: dict[str, list[Sample]] = {"buffered": [], "no_signal": [], "masked": []}
    for sample in group.samples:
        if sample.grade["outcome"] != Outcome.GRADED:
            bins.setdefault(f"failed/grader_{sample.grade['outcome']}", []).append(sample)
        elif not has_signal:
            bins["no_signal"].append(sample)
        elif mask_truncated and sample.stop_reason is StopReason.LENGTH:
            bins["masked"].append(sample)
        else:
            bins["buffered"].append(sample)
    return {name: samples for name, samples in bins.items() if samples}


def advantage_inputs(groups: Sequence[Group], capacity: int) -> dict[str, np.ndarray]:
    """Rewards, group indices and validity of all graded samples, padded so that their shape never changes."""
    rewards, index, valid = np.zeros(capacity, np.float32), np.zeros(capacity, np.int32), np.zeros(capacity, bool)
    flat = [(s.reward, i) for i, g in enumerate(groups) for s in graded(g).samples]
    for at, (reward, group) in enumerate(flat):
        rewards[at], index[at], valid[at] = reward, group, True
    return {"rewards": rewards, "groups": index, "valid": valid}


def by_sample(groups: Sequence[Group], values: np.ndarray) -> dict[tuple[int, int], float]:
    """Values in the order of `advantage_inputs`, by (group, index)."""
    keys = [(s.group, s.index) for g in groups for s in graded(g).samples]
    return dict(zip(keys, values.tolist()[: len(keys)], strict=True))


def token_ages(sample: Sample, version: int) -> np.ndarray:
    """int32 [N]: updates between the version that wrote each token and `version`; 0 where the policy wrote nothing."""
    ages = np.zeros(len(sample.tokens), np.int32)
    for span in sample.version_spans:
        ages[span.start : span.end] = version - span.version
    return ages


def trajectories(
    samples: Sequence[Sample], advantages: Mapping[tuple[int, int], float], version: int, *, with_head: bool
) -> list[Trajectory]:
    """Samples as the packer takes them. `advantages` is by (group, index), `version` that of the learner."""
    return [
        Trajectory(
            tokens=sample.tokens,
            mask=sample.mask,
            advantage=advantages[sample.group, sample.index],
            logprobs=sample.logprobs,
            ages=token_ages(sample, version),
            head=sample.head if with_head else None,
            group=sample.group,
        )
        for sample in samples
    ]
