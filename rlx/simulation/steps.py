"""Levels over time: how many were running, how much had been asked for."""

from __future__ import annotations

import numpy as np


class StepFunction:
    """A step function from its changes, and its integral."""

    def __init__(self, times: np.ndarray, changes: np.ndarray):
        order = np.argsort(times, kind="stable")
        self._times, self._levels = times[order], np.cumsum(changes[order])
        self._areas = np.concatenate([[0.0], np.cumsum(self._levels[:-1] * np.diff(self._times))])

    def step(self, time: float, *, before: bool = False) -> float:
        """The level at a time, or just before it."""
        i = np.searchsorted(self._times, time, side="left" if before else "right")
        return float(self._levels[i - 1]) if i else 0.0

    def area(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        i = np.searchsorted(self._times, time, side="right")
        return float(self._areas[i - 1] + self._levels[i - 1] * (time - self._times[i - 1])) if i else 0.0
