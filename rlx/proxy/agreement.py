"""How far a proxy ranks configurations as the target does, with intervals that hold at three to five seeds.

A percentile bootstrap over so few seeds covers a true tau of 1 hardly ever, as noise can only lower a perfect ranking.
So the interval starts from pairs: a pair of configurations is *decided* in a study where the t interval of its
difference excludes 0. A pair that both studies have decided counts as it is; every other one may be either way, and the
interval runs from all of these against to all of these for the proxy. Seeds of one configuration are few, so its
variance is drawn towards that of all (the moderated t of Smyth 2004, with `PRIOR_SEEDS` degrees of freedom).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Float

from rlx.metrics.statistics import kendall_tau_b, spearman

PRIOR_SEEDS = 4.0  # degrees of freedom that the common variance counts for beside a configuration's own
POWER = 0.8  # of `Pair.seeds_to_decide`
MOST_SEEDS, MOST_ATTEMPTS = 1000, 1_000_000  # more than this is "never" for a person who plans runs

Scores = Mapping[str, Sequence[float]]
TaskScores = Mapping[str, Float[np.ndarray, "seeds tasks"]]


@dataclasses.dataclass(frozen=True)
class Study:
    """One model's scores: means over seeds of C configurations, and what each pair's difference is known to."""

    means: Float[np.ndarray, " configurations"]
    difference: Float[np.ndarray, " pairs"]  # of the pair (i, j), i < j, in the order of itertools.combinations: i - j
    half_width: Float[np.ndarray, " pairs"]  # of its t interval; inf where no configuration has two seeds
    deviation: Float[np.ndarray, " pairs"]  # of one seed's score, root mean square of the two configurations
    wins: Float[np.ndarray, " pairs"]  # probability that a seed of i scores above one of j

    @property
    def decided(self) -> Float[np.ndarray, " pairs"]:
        """1 or -1 where a pair is decided, by the sign of its difference; 0 where it is not."""
        return np.where(np.abs(self.difference) > self.half_width, np.sign(self.difference), 0.0)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two configurations in both studies."""

    first: str
    second: str
    target_difference: float  # mean score of the first less that of the second
    target_interval: tuple[float, float]
    proxy_difference: float
    proxy_interval: tuple[float, float]
    verdict: str  # agree | disagree | not decided
    target_win_probability: float  # that a seed of the first scores above one of the second
    proxy_win_probability: float
    target_seeds_to_decide: int | None  # in each configuration, were its difference the true one; None: above 1000
    proxy_seeds_to_decide: int | None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What `agree` found. Rankings are by mean score; higher is better."""

    configurations: tuple[str, ...]
    target_means: tuple[float, ...]
    proxy_means: tuple[float, ...]
    kendall_tau: float  # tau-b; NaN where one ranking is constant
    kendall_interval: tuple[float, float]
    spearman: float  # NaN where one ranking is constant
    pairwise_agreement: float  # share of pairs that both means order in the same way
    decided_agreement: float  # the same of the pairs that are decided in both studies; NaN without any
    top1_agreement: float  # 1.0 where both have the same best configuration, else 0.0
    top1_probability: float  # share of resamples of the seeds in which they have
    undecided_pairs: tuple[tuple[str, str], ...]  # not decided in at least one of the studies
    pairs: tuple[Pair, ...]
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        low, high = self.kendall_interval
        open_pairs = f"{len(self.undecided_pairs)} of {len(self.pairs)} pairs not decided"
        return (
            f"Kendall tau-b {self.kendall_tau:.2f} [{low:.2f}, {high:.2f}], Spearman {self.spearman:.2f}, "
            f"{self.pairwise_agreement:.0%} of pairs ordered alike, {open_pairs}"
        )


def agree(
    target: dict[str, list[float]],
    proxy: dict[str, list[float]],
    *,
    bootstrap: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Agreement:
    """Compares the rankings that a target's and a proxy's runs give the same configurations.

    Args:
      target, proxy: configuration -> one score per seed; higher is better. The numbers of seeds may differ.
      bootstrap: resamples of the seeds for `top1_probability`.
      seed: of these.
      confidence: of the intervals.
    Raises:
      ValueError: other configurations in the one than in the other, fewer than two, a score that is not finite, or a
        configuration without any.
    """
    names = _check(target, proxy, bootstrap, confidence)
    first, second = (study([scores[name] for name in names], confidence) for scores in (target, proxy))
    resampled = _same_best(target, proxy, names, bootstrap, np.random.default_rng(seed))
    return _agreement(names, first, second, resampled, confidence)


def agree_over_tasks(
    target: TaskScores, proxy: TaskScores, *, bootstrap: int = 2000, seed: int = 0, confidence: float = 0.95
) -> Agreement:
    """`agree`, where the score of every held-out task is known: its intervals are over seeds and tasks.

    Args:
      target, proxy: configuration -> scores [seeds, tasks]; the tasks of one study are the same for all of it.
    Raises:
      ValueError: what `agree` raises, and for configurations of one study with other numbers of tasks.
    """
    of_target, of_proxy = (
        {name: np.mean(v, axis=1).tolist() for name, v in scores.items()} for scores in (target, proxy)
    )
    names = _check(of_target, of_proxy, bootstrap, confidence)
    for scores in (target, proxy):
        if len({np.shape(values)[1] for values in scores.values()}) > 1:
            raise ValueError("the configurations of one study must be evaluated on the same tasks")
    first, second = (
        over_tasks(study([m[n] for n in names], confidence), [np.asarray(s[n]) for n in names], confidence)
        for m, s in ((of_target, target), (of_proxy, proxy))
    )
    resampled = _same_best(of_target, of_proxy, names, bootstrap, np.random.default_rng(seed))
    return _agreement(names, first, second, resampled, confidence)


def _agreement(names: Sequence[str], first: Study, second: Study, same_best: float, confidence: float) -> Agreement:
    both = first.decided * second.decided
    tau = kendall_tau_b(first.means, second.means)
    low, high = 2.0 * float(np.mean(both > 0)) - 1.0, 1.0 - 2.0 * float(np.mean(both < 0))
    if math.isfinite(tau):  # tied means make tau-b's denominator smaller than the number of pairs
        low, high = min(low, tau), max(high, tau)
    listed = list(itertools.combinations(names, 2))
    return Agreement(
        configurations=tuple(names),
        target_means=tuple(first.means.tolist()),
        proxy_means=tuple(second.means.tolist()),
        kendall_tau=tau,
        kendall_interval=(low, high),
        spearman=spearman(first.means, second.means),
        pairwise_agreement=float(np.mean(first.difference * second.difference > 0)),
        decided_agreement=float(np.mean(both[both != 0] > 0)) if both.any() else math.nan,
        top1_agreement=float(np.argmax(first.means) == np.argmax(second.means)),
        top1_probability=same_best,
        undecided_pairs=tuple(pair for pair, sign in zip(listed, both) if sign == 0),
        pairs=_pairs(listed, first, second, confidence),
        confidence=confidence,
    )


def study(scores: Sequence[Sequence[float]], confidence: float) -> Study:
    """The means of one study's configurations and the t intervals of their differences."""
    counts = np.array([len(values) for values in scores], np.float64)
    means = np.array([np.mean(values) for values in scores])
    squares = np.array([np.sum(np.square(np.asarray(v) - m)) for v, m in zip(scores, means)])
    freedom = float(np.sum(counts - 1))
    prior = min(PRIOR_SEEDS, freedom)
    i, j = np.triu_indices(len(means), 1)
    difference = means[i] - means[j]
    wins = win_probabilities(scores)
    if not freedom:
        unknown = np.full(len(i), np.inf)
        return Study(means, difference, unknown, unknown, wins)
    variance = (prior * squares.sum() / freedom + squares) / (prior + counts - 1)
    width = scipy.special.stdtrit(np.minimum(prior + counts[i] + counts[j] - 2, freedom), (1 + confidence) / 2)
    error = np.sqrt(variance[i] / counts[i] + variance[j] / counts[j])
    return Study(means, difference, width * error, np.sqrt((variance[i] + variance[j]) / 2), wins)


def over_tasks(found: Study, scores: Sequence[Float[np.ndarray, "seeds tasks"]], confidence: float) -> Study:
    """The same study with intervals that hold for other held-out tasks, too, and not only for other seeds.

    To the squared half-widths over seeds that over tasks is added, of the differences of each task's mean over seeds.
    Both hold the noise of single attempts, so the sum is on the safe side.
    """
    per_task = np.array([np.mean(values, axis=0) for values in scores])
    i, j = np.triu_indices(len(per_task), 1)
    tasks = per_task.shape[1]
    if tasks < 2:
        return dataclasses.replace(found, half_width=np.full(len(i), np.inf))
    error = np.std(per_task[i] - per_task[j], axis=1, ddof=1) / math.sqrt(tasks)
    width = scipy.special.stdtrit(tasks - 1, (1 + confidence) / 2) * error
    return dataclasses.replace(found, half_width=np.hypot(found.half_width, width))


def seeds_to_decide(difference: float, deviation: float, confidence: float) -> int | None:
    """Seeds of each of two configurations that decide them with probability 0.8, were `difference` the true one.

    n = 2 (z_{(1 + c) / 2} + z_{0.8})^2 s^2 / d^2, by the normal approximation. None above 1000, and where the deviation
    is not known.
    """
    if not math.isfinite(deviation) or difference == 0:
        return None
    normal = scipy.special.ndtri((1 + confidence) / 2) + scipy.special.ndtri(POWER)
    needed = 2 * (normal * deviation / difference) ** 2
    return max(2, math.ceil(needed)) if needed <= MOST_SEEDS else None


def attempts_to_decide(first: float, second: float, confidence: float) -> int | None:
    """Attempts at each of two pass rates that tell them apart with probability 0.8, were these the true ones.

    n = (z_{(1 + c) / 2} + z_{0.8})^2 (p (1 - p) + q (1 - q)) / (p - q)^2. None for equal rates and above a million.
    """
    if first == second:
        return None
    normal = scipy.special.ndtri((1 + confidence) / 2) + scipy.special.ndtri(POWER)
    needed = normal**2 * (first * (1 - first) + second * (1 - second)) / (first - second) ** 2
    return max(2, math.ceil(needed)) if needed <= MOST_ATTEMPTS else None


def win_probabilities(scores: Sequence[Sequence[float]]) -> Float[np.ndarray, " pairs"]:
    """Of each pair of configurations the probability that a seed of the first scores above one of the second, ties
    counted half: Mann and Whitney's U / (m n)."""
    table = np.full((len(scores), max(map(len, scores))), np.nan)
    for row, values in zip(table, scores):
        row[: len(values)] = values
    i, j = np.triu_indices(len(scores), 1)
    first, second = table[i][:, :, None], table[j][:, None, :]
    known = np.isfinite(first) & np.isfinite(second)
    won = np.where(known, (first > second) + 0.5 * (first == second), 0.0)
    return won.sum((1, 2)) / known.sum((1, 2))


def _pairs(listed: Sequence[tuple[str, str]], first: Study, second: Study, confidence: float) -> tuple[Pair, ...]:
    words = {1: "agree", -1: "disagree", 0: "not decided"}
    verdicts = [words[int(sign)] for sign in first.decided * second.decided]
    return tuple(
        Pair(
            *names,
            *_difference(first, k),
            *_difference(second, k),
            verdicts[k],
            float(first.wins[k]),
            float(second.wins[k]),
            _needed(first, k, confidence),
            _needed(second, k, confidence),
        )
        for k, names in enumerate(listed)
    )


def _difference(of: Study, pair: int) -> tuple[float, tuple[float, float]]:
    middle, half = float(of.difference[pair]), float(of.half_width[pair])
    return middle, (middle - half, middle + half)


def _needed(of: Study, pair: int, confidence: float) -> int | None:
    return seeds_to_decide(float(of.difference[pair]), float(of.deviation[pair]), confidence)


def _same_best(target: Scores, proxy: Scores, names: Sequence[str], draws: int, rng: np.random.Generator) -> float:
    """Share of bootstrap resamples over seeds in which both studies have the same best mean."""

    def best(scores: Scores) -> np.ndarray:
        rows = [np.asarray(scores[name], np.float64) for name in names]
        means = [row[rng.integers(0, len(row), (draws, len(row)))].mean(1) for row in rows]
        return np.argmax(means, axis=0)

    return float(np.mean(best(target) == best(proxy)))


def _check(target: Scores, proxy: Scores, bootstrap: int, confidence: float) -> list[str]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: it is between 0 and 1, such as 0.95")
    if bootstrap < 1:
        raise ValueError(f"bootstrap = {bootstrap}: at least 1 resample is needed, 2000 are usual")
    only = [f"{name!r} only of the {of}" for name, of in _one_sided(target, proxy)]
    if only:
        raise ValueError(f"both studies need the same configurations; there are scores of {', '.join(only[:5])}")
    names = list(target)
    if len(names) < 2:
        raise ValueError(f"a ranking needs at least two configurations, got {len(names)}")
    for of, scores in (("target", target), ("proxy", proxy)):
        for name in names:
            values = np.asarray(scores[name], np.float64)
            if values.ndim != 1 or not values.size:
                raise ValueError(f"the {of}'s configuration {name!r} has no scores; leave it out or run it")
            if not np.isfinite(values).all():
                raise ValueError(f"the {of}'s configuration {name!r} has a score that is not finite: {values.tolist()}")
    return names


def _one_sided(target: Scores, proxy: Scores) -> list[tuple[str, str]]:
    return [(n, "target") for n in target if n not in proxy] + [(n, "proxy") for n in proxy if n not in target]
