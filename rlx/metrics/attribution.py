"""Why do a sampler's log-probs differ from the trainer's? Each probe supposes one cause and predicts the sampler's.

The cause is the one whose prediction comes out. A prediction that explains most of a gap, and not all of it, is named
where no other does better; where none does, the cause is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Cause = Literal[
    "clean",
    "shift by one",
    "stale version",
    "temperature",
    "truncated sampling",
    "dtype",
    "head",
    "template",
    "unknown",
]

# Mean |gap| in nats up to which two programs that compute the same policy agree, by the type that they compute in.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 5e-3}
TAIL = 10.0  # times the tolerance: the most that 99 % of the tokens may be apart
EXPLAINED = 0.2  # of the gap that a prediction may leave and still be the cause
EXPLAINED_ROUNDING = 0.7  # the same for rounding, which another program repeats in part only
ROUNDING = ("dtype", "head")


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A supposed cause. `predicted`: float32 [W], the sampler's log-probs if it were the cause; NaN: nothing said."""

    cause: Cause
    detail: str
    predicted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a probe leaves: mean |sampler - predicted| over the tokens that it speaks of, nats."""

    cause: Cause
    detail: str
    residual: float
    explains: bool


@dataclasses.dataclass(frozen=True)
class Attribution:
    """gap_mean is mean |sampler - trainer|, nats; gap_bias the mean of sampler - trainer."""

    cause: Cause
    evidence: str
    tokens: int
    gap_mean: float
    gap_bias: float
    tolerance: float
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        return self.cause == "clean"

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


def agrees(gap: np.ndarray, tolerance: float) -> bool:
    """Whether two programs' log-probs differ by rounding only."""
    size = np.abs(gap)
    return bool(size.size and size.mean() <= tolerance and np.quantile(size, 0.99) <= TAIL * tolerance)


def attribute(
    sampler: np.ndarray, trainer: np.ndarray, probes: Sequence[Probe], dtype: str, truncated: str = ""
) -> Attribution:
    """Names the cause of the gap between two arrays of log-probs [W].

    Args:
      trainer: under the version that wrote each token, at the recorded temperature; its type is `dtype`.
      truncated: evidence that tokens were drawn from less than the recorded distribution, "" = none. It is a cause of
        its own where the log-probs agree.
    Raises:
      ValueError: where there is no token to compare.
    """
    if not len(sampler):
        raise ValueError("there is no written token to compare")
    tolerance, gap = TOLERANCE[dtype], sampler - trainer
    base = float(np.abs(gap).mean())
    outcomes = tuple(_outcome(sampler, trainer, probe, tolerance) for probe in probes)
    if agrees(gap, tolerance):
        cause: Cause = "truncated sampling" if truncated else "clean"
        evidence = truncated or (
            f"sampler and trainer agree on {len(gap)} tokens: mean |gap| {base:.2g} nats, {dtype} allows {tolerance:g}"
        )
    else:
        cause, evidence = _verdict([o for o in outcomes if o.explains], gap, truncated)
    return Attribution(cause, evidence, len(gap), base, float(gap.mean()), tolerance, outcomes)


def _verdict(explaining: Sequence[Outcome], gap: np.ndarray, truncated: str) -> tuple[Cause, str]:
    base = np.abs(gap).mean()
    said = f"mean |gap| is {base:.3g} nats over {len(gap)} tokens"
    if not explaining:
        more = f"; beside it, {truncated}" if truncated else ""
        return "unknown", f"{said}, and no probe explains it{more}"
    best = min(explaining, key=lambda o: o.residual)
    return best.cause, f"{said}; {best.detail} it is {best.residual:.2g}"


def _outcome(sampler: np.ndarray, trainer: np.ndarray, probe: Probe, tolerance: float) -> Outcome:
    known = np.isfinite(probe.predicted)
    if known.sum() < max(2, len(sampler) // 4):
        return Outcome(probe.cause, probe.detail, float("nan"), False)
    left, gap = np.abs((sampler - probe.predicted)[known]), np.abs((sampler - trainer)[known])
    residual, share = float(left.mean()), EXPLAINED_ROUNDING if probe.cause in ROUNDING else EXPLAINED
    explains = residual <= share * gap.mean() or (agrees(left, tolerance) and not agrees(gap, tolerance))
    return Outcome(probe.cause, probe.detail, residual, bool(explains))
