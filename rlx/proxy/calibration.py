"""The best lambda of a sweep, with its interval: a parabola over log lambda, over resampled seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 0.95
LEAST_POINTS = 3  # of a parabola


class Fit(NamedTuple):
    best: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.best:.2f} [{self.low:.2f}, {self.high:.2f}]"


def fit_lambda(scores: Mapping[float, Sequence[float]]) -> Fit | None:
    """Where the score is highest: lambda -> the scores of its seeds.

    The parabola goes through the best lambda's mean and its neighbours', of which there are as many as the parabola
    needs; where it has no top within the sweep, the end of the sweep is the best. The interval is a percentile
    bootstrap over seeds. With few seeds it is too narrow (3 to 5 cover far less than they say), so intervals that do
    not overlap are a hint, no proof.

    None for fewer than three lambdas, or where all have one mean.
    """
    if len(scores) < LEAST_POINTS:
        return None
    lams = np.array(sorted(scores))
    middles = np.array([float(np.mean(scores[lam])) for lam in lams])
    if np.ptp(middles) == 0:
        return None
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        means = [float(np.mean(rng.choice(np.asarray(scores[lam]), len(scores[lam])))) for lam in lams]
        drawn.append(_top(np.log(lams), np.array(means)))
    best = _top(np.log(lams), middles)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Fit(float(np.exp(best)), float(np.exp(low)), float(np.exp(high)))


def _top(x: np.ndarray, y: np.ndarray) -> float:
    """Of the parabola through the highest point and those beside it."""
    at = int(np.argmax(y))
    if at in (0, len(x) - 1):
        return float(x[at])
    a, b, _ = np.polyfit(x[at - 1 : at + 2], y[at - 1 : at + 2], 2)
    return float(-b / (2 * a)) if a < 0 else float(x[at])
