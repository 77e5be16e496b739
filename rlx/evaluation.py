"""One evaluation: attempts at held-out tasks, their pass rate with Wilson's interval, pass@k, by source."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.config.schema import EvalConfig
from rlx.metrics.rollout import PASS
from rlx.metrics.statistics import pass_at_k, wilson_interval
from rlx.rollout.collect import MakeEnvironment, Sampling, collect
from rlx.rollout.engine import Engine
from rlx.rollout.fates import graded
from rlx.types import Group, StopReason, Task


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The interval is Wilson's over attempts, as if attempts at one task were independent.

    An attempt whose grading failed is no verdict: it is counted in `failed_gradings` and nowhere else.
    """

    pass_rate: float
    pass_rate_low: float
    pass_rate_high: float
    attempts: int
    failed_gradings: int
    tasks: int
    tokens: int
    reward_mean: float
    response_length_mean: float
    truncated_fraction: float
    pass_at_k: dict[str, float]
    by_source: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Metrics of the group `eval/`."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        at_k, by_source = own.pop("pass_at_k"), own.pop("by_source")
        values = {f"eval/{name}": float(value) for name, value in own.items()}
        values |= {f"eval/pass_at_{k}": value for k, value in at_k.items()}
        return values | {f"eval/pass_rate_{source}": value for source, value in by_source.items()}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"pass rate {self.pass_rate:.3f} [{self.pass_rate_low:.3f}, {self.pass_rate_high:.3f}] "
            f"({self.attempts} attempts at {self.tasks} held-out tasks)"
        )


async def evaluate(
    engine: Engine,
    environments: MakeEnvironment,
    tasks: Sequence[Task],
    config: EvalConfig,
    sampling: Sampling,
) -> tuple[EvalResult, list[Group]]:
    """Attempt every task `sampling.group_size` times. The same seed asks for the same samples at every evaluation."""
    groups = await collect(engine, environments, list(enumerate(tasks)), sampling)
    return summarise(groups, config), groups


def summarise(groups: Sequence[Group], config: EvalConfig) -> EvalResult:
    groups, failed = [graded(g) for g in groups], sum(len(g.samples) - len(graded(g).samples) for g in groups)
    samples = [s for g in groups for s in g.samples]
    if not samples:
        raise ValueError(
            f"all {failed} gradings of the evaluation failed; see samples.jsonl, grade.detail, for the reason"
        )
    passed = [s.reward >= PASS for s in samples]
    low, high = wilson_interval(sum(passed), len(passed), config.confidence)
    counts = [(len(g.samples), sum(s.reward >= PASS for s in g.samples)) for g in groups]
    sources = sorted({g.task.source for g in groups})
    return EvalResult(
        pass_rate=float(np.mean(passed)),
        pass_rate_low=low,
        pass_rate_high=high,
        attempts=len(samples),
        failed_gradings=failed,
        tasks=len(groups),
        tokens=sum(s.num_written for s in samples),
        reward_mean=float(np.mean([s.reward for s in samples])),
        response_length_mean=float(np.mean([s.num_written for s in samples])),
        truncated_fraction=float(np.mean([s.stop_reason is StopReason.LENGTH for s in samples])),
        pass_at_k={
            str(k): float(np.mean([pass_at_k(n, c, k) for n, c in counts if n >= k]))
            for k in config.k
            if any(n >= k for n, _ in counts)
        },
        by_source={
            source: float(np.mean([s.reward >= PASS for s in samples if s.task.source == source])) for source in sources
        },
    )
