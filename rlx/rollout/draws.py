"""Random lengths and durations from a table of quantiles: one draw is one look-up, and a function of a number alone."""

from __future__ import annotations

import numpy as np
import scipy.special

from rlx.config.simulation import DistributionConfig

BITS = 12
POINTS = 1 << BITS  # entries of a table, at the probabilities (i + 1/2) / POINTS


class Draw:
    """Values of a distribution, all multiplied by `scale`."""

    __slots__ = ("mean", "table")

    def __init__(self, config: DistributionConfig, scale: float = 1.0):
        table = quantile_table(config) * scale
        self.mean = float(table.mean())
        self.table: list[float] = table.tolist()

    def at(self, probability: float) -> float:
        """The value at a probability in [0, 1)."""
        return self.table[int(probability * POINTS)]

    def of_seed(self, seed: int) -> float:
        """The value that belongs to a uint32, as uniform numbers do."""
        return self.table[seed >> (32 - BITS)]


def quantile_table(config: DistributionConfig) -> np.ndarray:
    """float64 [POINTS], ascending. lognormal and gamma keep their mean exactly, though the last tail is cut."""
    probability = (np.arange(POINTS) + 0.5) / POINTS
    mean, cv = config.mean, config.cv
    if config.kind == "quantiles":
        return np.interp(probability, np.linspace(0.0, 1.0, len(config.quantiles)), config.quantiles)
    if config.kind == "constant" or cv == 0 or mean == 0:
        return np.full(POINTS, float(mean))
    if config.kind == "beta":
        strength = (1 - mean) / (cv**2 * mean) - 1  # alpha + beta
        return scipy.special.betaincinv(mean * strength, (1 - mean) * strength, probability)
    if config.kind == "gamma":
        table = scipy.special.gammaincinv(1 / cv**2, probability)
    else:
        table = np.exp(np.sqrt(np.log1p(cv**2)) * scipy.special.ndtri(probability))
    return table * (mean / table.mean())
