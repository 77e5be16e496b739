"""Samples and groups for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.types import Group, Sample, StopReason, Task, TopK, VersionSpan


def make_task(index: int = 0, source: str = "sums") -> Task:
    return Task(f"{source}/{index}", source, question="1+1", answer="2", grader="number")


def make_sample(
    group: int = 0,
    index: int = 0,
    *,
    prompt: int = 3,
    written: int = 4,
    reward: float = 0.0,
    stop: StopReason = StopReason.STOP,
    outcome: str = "graded",
    seconds: float = 0.25,
    spans: Sequence[tuple[int, int, int]] | None = None,
    head_size: int = 0,
    source: str = "sums",
) -> Sample:
    """Tokens count up from 10; `spans` are (version, start, end) over token indices, all of version 0 by default."""
    length = prompt + written
    mask = np.arange(length) >= prompt
    head = TopK(np.arange(written * head_size).reshape(written, -1), np.full((written, head_size), -1.0, np.float32))
    grade: dict[str, Any] = {"outcome": outcome, "seconds": seconds}
    return Sample(
        task=make_task(group, source),
        group=group,
        index=index,
        tokens=np.arange(10, 10 + length, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        head=head if head_size else None,
        version_spans=tuple(VersionSpan(*s) for s in spans or [(0, prompt, length)]),
        stop_reason=stop,
        text="text",
        reward=reward,
        grade=grade,
    )


def make_group(rewards: Sequence[float], group: int = 0, source: str = "sums", **changes: Any) -> Group:
    samples = tuple(make_sample(group, i, reward=r, source=source, **changes) for i, r in enumerate(rewards))
    return Group(make_task(group, source), samples)
