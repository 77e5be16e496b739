"""Graded groups to the sequences of an update: each sample that is trained on, with its advantage and ages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.data.packing import Trajectory
from rlx.rollout.fates import graded
from rlx.types import Group, Sample


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


def token_routes(sample: Sample) -> np.ndarray | None:
    """int32 [N, layers of experts, k]: the experts that each token was sent to, -1 where that is not recorded."""
    if sample.routes is None:
        return None
    routes = np.full((len(sample.tokens), *sample.routes.shape[1:]), -1, np.int32)
    routes[np.flatnonzero(sample.mask) - 1] = sample.routes
    return routes


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
            routes=token_routes(sample),
        )
        for sample in samples
    ]
