"""What a set of runs shows: trends within each run, evaluations with their intervals, and who is better at equal cost.

Trends are judged within a run and never between models: a proxy's reward says nothing of a target's. A run is called
better than another one of its model only by evaluations on the same held-out set, at a matched number of seconds or of
generated tokens, and only where the interval of the difference excludes 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import scipy.stats

from rlx.metrics.statistics import wilson_interval
from rlx.proxy.agreement import attempts_to_decide
from rlx.proxy.runs import CONFIDENCE, Evaluation, Point, RunData

Direction = Literal["rises", "falls", "no trend", "too few points"]
LEAST_POINTS = 6  # of a trend that is judged
LEVEL = 0.05  # of the two-sided test of a trend
GROWING = ("offpolicy/kl_k3", "offpolicy/age_mean")  # what must not grow for ever
MATCHED = 0.1  # relative difference of two costs that still count as equal
MOST_PAIRS = 200  # comparisons listed; more runs than these pairs need are shown in the figures


@dataclasses.dataclass(frozen=True)
class Trend:
    direction: Direction
    first: float  # mean of the first quarter
    last: float  # of the last quarter


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is said of one run."""

    run: str
    model: str
    reward: Trend | None
    validation: str  # rises | falls | not decided | no evaluations | no interval: attempts unknown
    validation_change: tuple[float, float, float] | None  # last less first, with its interval
    peak_update: int | None
    peak_above_last: str  # yes | not decided | is the last
    growing: Mapping[str, Direction]  # of the second half of the run
    reproduces_learning: str  # yes | no | not decided: training and validation reward both rise


@dataclasses.dataclass(frozen=True)
class Matched:
    """Two runs of one model at equal cost."""

    first: str
    second: str
    axis: str
    cost: float
    difference: tuple[float, float, float]  # pass rate of the first less the second's, with its interval
    verdict: str  # NAME is better | not decided
    attempts_to_decide: int | None  # of each, were these the true rates; None: above a million


def read(run: RunData) -> Reading:
    reward = _reward_trend(run)
    validation, change = validation_change(run.evaluations)
    peak, above = peak_of(run.evaluations)
    halves = {name: run.curves[name][len(run.curves[name]) // 2 :] for name in GROWING if name in run.curves}
    return Reading(
        run=run.name,
        model=run.model,
        reward=reward,
        validation=validation,
        validation_change=change,
        peak_update=peak,
        peak_above_last=above,
        growing={name: trend(points).direction for name, points in halves.items()},
        reproduces_learning=_reproduces(reward, validation),
    )


def trend(points: Sequence[Point]) -> Trend:
    """Mann-Kendall's test: Kendall's tau of the values against the order of updates."""
    values = np.array([p.value for p in points])
    quarter = max(1, len(values) // 4)
    first, last = (float(np.mean(part)) if len(part) else math.nan for part in (values[:quarter], values[-quarter:]))
    if len(values) < LEAST_POINTS:
        return Trend("too few points", first, last)
    found = scipy.stats.kendalltau(np.arange(len(values)), values)
    if not found.pvalue < LEVEL:  # NaN where the values are constant
        return Trend("no trend", first, last)
    return Trend("rises" if found.statistic > 0 else "falls", first, last)


def difference(later: Evaluation, earlier: Evaluation, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """(difference of two pass rates, low, high), Newcombe 1998, method 10: from both Wilson intervals.

    Attempts at one task are not independent, and two evaluations share their tasks: the interval is that of attempts.
    """
    rates = []
    for e in (later, earlier):
        rate = e.passes / e.attempts
        low, high = wilson_interval(e.passes, round(e.attempts), confidence)
        rates.append((rate, low, high))
    (p, p_low, p_high), (q, q_low, q_high) = rates
    return p - q, p - q - math.hypot(p - p_low, q_high - q), p - q + math.hypot(p_high - p, q - q_low)


def decided(change: tuple[float, float, float]) -> int:
    """1 or -1 where the interval excludes 0."""
    _, low, high = change
    return 1 if low > 0 else -1 if high < 0 else 0


def validation_change(evaluations: Sequence[Evaluation]) -> tuple[str, tuple[float, float, float] | None]:
    """The last evaluation against the first one."""
    if len(evaluations) < 2:
        return "no evaluations" if not evaluations else "not decided", None
    if not all(_has_interval(e) for e in (evaluations[0], evaluations[-1])):
        return "no interval: attempts unknown", None
    change = difference(evaluations[-1], evaluations[0])
    return {1: "rises", -1: "falls", 0: "not decided"}[decided(change)], change


def peak_of(evaluations: Sequence[Evaluation]) -> tuple[int | None, str]:
    """(update of the best evaluation, whether it is above the last one)."""
    if not evaluations:
        return None, "not decided"
    best = max(evaluations, key=lambda e: e.point.value)
    if best.point.value <= evaluations[-1].point.value:
        return int(evaluations[-1].point.updates), "is the last"
    if not (_has_interval(best) and _has_interval(evaluations[-1])):
        return int(best.point.updates), "not decided"
    return int(best.point.updates), "yes" if decided(difference(best, evaluations[-1])) > 0 else "not decided"


def matched_pairs(runs: Sequence[RunData]) -> list[Matched]:
    """Runs of one model, two by two, at the largest tokens and seconds that both have an evaluation at."""
    found: list[Matched] = []
    for first, second in itertools.combinations(runs, 2):
        if first.model == second.model and len(found) < MOST_PAIRS:
            found += [m for axis in ("tokens", "seconds") if (m := _matched(first, second, axis)) is not None]
    return found


def _matched(first: RunData, second: RunData, axis: Any) -> Matched | None:
    pairs = [
        (a, b)
        for a, b in itertools.product(first.evaluations, second.evaluations)
        if _comparable(a, b) and _equal_cost(a.point.at(axis), b.point.at(axis))
    ]
    if not pairs:
        return None
    a, b = max(pairs, key=lambda pair: pair[0].point.at(axis) + pair[1].point.at(axis))
    change = difference(a, b)
    name = {1: first.name, -1: second.name, 0: ""}[decided(change)]
    needed = attempts_to_decide(a.point.value, b.point.value, CONFIDENCE)
    verdict = f"{name} is better" if name else OPEN
    return Matched(first.name, second.name, axis, a.point.at(axis), change, verdict, needed)


OPEN = "not decided"


def _comparable(a: Evaluation, b: Evaluation) -> bool:
    """Made on the same number of held-out tasks, which one training run never changes, with intervals."""
    return _has_interval(a) and _has_interval(b) and (a.tasks == b.tasks or math.isnan(a.tasks + b.tasks))


def _equal_cost(a: float, b: float) -> bool:
    return min(a, b) > 0 and abs(a - b) <= MATCHED * max(a, b)


def _has_interval(e: Evaluation) -> bool:
    return math.isfinite(e.low) and math.isfinite(e.high) and e.attempts >= 1


def _reward_trend(run: RunData) -> Trend | None:
    name = next((n for n in ("reward/mean", "reward/pass_rate") if n in run.curves), None)
    return None if name is None else trend(run.curves[name])


def _reproduces(reward: Trend | None, validation: str) -> str:
    seen = (reward.direction if reward is not None else OPEN, validation)
    return "yes" if seen == ("rises", "rises") else "no" if "falls" in seen else OPEN
