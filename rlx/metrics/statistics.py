"""Statistics of evaluations and of rankings. scipy's where scipy has them.

scipy.stats takes half a second to import, which a training run would spend before its first update: only what needs
it imports it.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from jaxtyping import Real, Shaped


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k attempts passes, from n attempts of which c passed.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), equation 1.

    Raises:
      ValueError: unless 0 <= successes <= attempts and 1 <= k <= attempts.
    """
    _check_attempts(successes, attempts)
    if not 1 <= k <= attempts:
        raise ValueError(
            f"pass@k needs 1 <= k <= attempts, got k = {k} with {attempts} attempts; sample more or lower k"
        )
    return float(1.0 - np.prod(1.0 - k / np.arange(attempts - successes + 1, attempts + 1)))


def wilson_interval(successes: int, attempts: int, confidence: float) -> tuple[float, float]:
    """Score interval of a proportion without continuity correction, Wilson 1927: (low, high) within [0, 1].

    The p with (c/n - p)² = z² p (1 - p) / n for c successes of n attempts.

    Raises:
      ValueError: unless 0 <= successes <= attempts, attempts >= 1 and 0 < confidence < 1.
    """
    _check_attempts(successes, attempts)
    _check_confidence(confidence)
    z, rate = NormalDist().inv_cdf((1 + confidence) / 2), successes / attempts
    scale = 1 + z**2 / attempts
    centre = (rate + z**2 / (2 * attempts)) / scale
    half = z * math.sqrt(rate * (1 - rate) / attempts + (z / (2 * attempts)) ** 2) / scale
    # Rounding must not put an end on the wrong side of the rate.
    return max(min(centre - half, rate), 0.0), min(max(centre + half, rate), 1.0)


def no_signal_probability(pass_rate: float, group_size: int) -> float:
    """Probability that all of a group's binary rewards are equal: p^G + (1 - p)^G.

    Raises:
      ValueError: unless 0 <= pass_rate <= 1 and group_size >= 1.
    """
    if not 0.0 <= pass_rate <= 1.0:
        raise ValueError(f"a pass rate is in [0, 1], got {pass_rate}")
    if group_size < 1:
        raise ValueError(f"a group has at least one sample, got group_size = {group_size}")
    return float(pass_rate**group_size + (1.0 - pass_rate) ** group_size)


def kendall_tau_b(x: Real[np.ndarray, " items"], y: Real[np.ndarray, " items"]) -> float:
    """Kendall's rank correlation with ties, tau-b. NaN where x or y is constant: no order to agree with.

    Raises:
      ValueError: for lengths that differ or fewer than two items.
    """
    import scipy.stats

    x, y = _pairs(x, y)
    return float(scipy.stats.kendalltau(x, y, variant="b").statistic)


def spearman(x: Real[np.ndarray, " items"], y: Real[np.ndarray, " items"]) -> float:
    """Spearman's rank correlation, ties averaged. NaN where x or y is constant: no order to agree with.

    Raises:
      ValueError: for lengths that differ or fewer than two items.
    """
    import scipy.stats

    x, y = _pairs(x, y)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(x, y).statistic)


def bootstrap_interval(
    values: Shaped[np.ndarray, "..."],
    statistic: Callable[[np.ndarray], float],
    confidence: float,
    seed: int,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval (Efron 1979) of `statistic`, resampling every axis on its own.

    For values [tasks] this is the ordinary bootstrap; for [seeds, tasks] seeds and tasks are both drawn with
    replacement (Owen 2007, the pigeonhole bootstrap), so that the interval covers new seeds and new tasks. scipy's
    `bootstrap` resamples one axis only.

    Args:
      statistic: array of the shape of `values` -> number.
    Raises:
      ValueError: for no values or a confidence outside (0, 1).
    """
    values = np.asarray(values, np.float64)
    if values.ndim == 0 or values.size == 0:
        raise ValueError(f"a bootstrap needs values along at least one axis, got the shape {values.shape}")
    _check_confidence(confidence)
    rng = np.random.default_rng(seed)
    drawn = [statistic(values[np.ix_(*(rng.integers(0, n, n) for n in values.shape))]) for _ in range(resamples)]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, (tail, 1.0 - tail))
    return float(low), float(high)


def _check_attempts(successes: int, attempts: int) -> None:
    if attempts < 1:
        raise ValueError(f"there must be at least one attempt, got {attempts}")
    if not 0 <= successes <= attempts:
        raise ValueError(f"successes must be between 0 and the {attempts} attempts, got {successes}")


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"a confidence is between 0 and 1, such as 0.95, got {confidence}")


def _pairs(x, y) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size < 2:
        raise ValueError(f"a rank correlation needs two equally long lists of at least 2, got {x.shape} and {y.shape}")
    return x, y
