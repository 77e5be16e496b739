"""Which tasks a policy sometimes passes, from as few attempts as an error that is stated beforehand needs.

A task is an *edge task* where its pass rate is within a band. Sampling one is an optimal stopping problem: an attempt
costs `price`, a wrong classification 1, and a beta prior is fitted to all tasks (empirical Bayes), so that dynamic
programming says in which states (passes, attempts) another attempt is worth its price. Every task is sampled until its
state says stop; then the price falls, until the expected share of misclassified tasks is below the error that was asked
for. So a task that is clearly hopeless or clearly solved costs a handful of attempts, and one that sits on the band's
border is left alone rather than sampled for ever.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import scipy.special
from jaxtyping import Bool, Float, Int

PRIOR_BOUNDS = (0.05, 20.0)  # of both parameters of the beta prior
PRIOR_GRID = 0.2  # of their logarithms, where tables are made; the classification takes the prior as it is
FIRST_PRICE, LEAST_PRICE = 0.01, 1e-6  # of an attempt, in misclassified tasks
CHEAPER = 0.8  # each price is this times the one before
GIVE_UP = 8  # attempts at a task without a verdict, where they outnumber those with one
MARGIN = 0.005  # share of tasks: the prior comes from the same attempts, so the posterior is a little too sure


@dataclasses.dataclass(frozen=True)
class EdgeOptions:
    """The band of pass rates, the share of tasks that may be misclassified, and how attempts are spent."""

    low: float = 0.1
    high: float = 0.9
    error: float = 0.05
    first_attempts: int = 4  # at every task, before the first choice
    most_attempts: int = 256  # at one task
    at_once: int = 1  # attempts at a task that is sampled further, at least; more = fewer rounds, more attempts

    def __post_init__(self) -> None:
        """Raises ValueError for options that cannot be honoured."""
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"the band [{self.low}, {self.high}] must be within [0, 1], the lower end first")
        if not 2 * MARGIN <= self.error < 0.5:
            raise ValueError(f"error = {self.error}: a share of tasks from {2 * MARGIN} and below 0.5, such as 0.05")
        if not 1 <= self.first_attempts <= self.most_attempts:
            raise ValueError(f"first_attempts = {self.first_attempts}: between 1 and most_attempts")
        if self.at_once < 1:
            raise ValueError(f"at_once = {self.at_once}: at least 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Tally:
    """What is known of the tasks so far."""

    passes: Int[np.ndarray, " tasks"]
    attempts: Int[np.ndarray, " tasks"]  # with a verdict
    failed: Int[np.ndarray, " tasks"] | int = 0  # attempts without one: their grading failed

    def plus(
        self,
        asked: Int[np.ndarray, " tasks"],
        passes: Int[np.ndarray, " tasks"],
        attempts: Int[np.ndarray, " tasks"],
    ) -> Tally:
        """With a further round, of which `asked` attempts were wanted.

        Raises:
          RuntimeError: where there is no verdict of any task.
        """
        tally = Tally(self.passes + passes, self.attempts + attempts, self.failed + asked - attempts)
        if not tally.attempts.any():
            raise RuntimeError(f"none of {asked.sum()} attempts got a verdict; see whether the graders work")
        return tally

    @property
    def given_up(self) -> Bool[np.ndarray, " tasks"]:
        """Tasks that are not attempted again: their grader mostly fails."""
        return np.broadcast_to((self.failed >= GIVE_UP) & (self.failed > self.attempts), self.attempts.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Verdicts:
    """Every task's classification with what it rests on."""

    prior: tuple[float, float]  # of the beta distribution that the tasks' pass rates were taken to come from
    in_band: Float[np.ndarray, " tasks"]  # posterior probability that the pass rate is in the band
    expected_error: float  # share of the tasks with a verdict, `MARGIN` included

    @property
    def is_edge(self) -> np.ndarray:
        return self.in_band > 0.5


def nothing_known(tasks: int) -> Tally:
    return Tally(np.zeros(tasks, np.int64), np.zeros(tasks, np.int64))


def classify(tally: Tally, options: EdgeOptions) -> Verdicts:
    """The most probable classification of every task."""
    prior = fit_prior(tally)
    probability = _in_band(tally.passes, tally.attempts, prior, options)
    wrong = np.minimum(probability, 1 - probability)[tally.attempts > 0]
    return Verdicts(prior, probability, MARGIN + float(np.mean(wrong)))


def next_attempts(tally: Tally, options: EdgeOptions) -> Int[np.ndarray, " tasks"]:
    """How many further attempts each task should get now; all 0 where the error is reached or no attempt may help."""
    given_up = tally.given_up
    first = np.where(given_up, 0, np.maximum(options.first_attempts - tally.attempts, 0))
    if first.any():
        return first
    verdicts = classify(tally, options)
    room = options.most_attempts - tally.attempts
    price = FIRST_PRICE
    while verdicts.expected_error > options.error and price > LEAST_PRICE:
        worth = attempts_worth(price, _on_grid(verdicts.prior), options)[tally.attempts, tally.passes]
        wanted = np.where(given_up, 0, worth)
        if wanted.any():
            return np.where(wanted > 0, np.minimum(np.maximum(wanted, options.at_once), room), 0)
        price *= CHEAPER
    return np.zeros_like(tally.attempts)


def rounds(
    attempt: Callable[[Int[np.ndarray, " tasks"]], tuple[np.ndarray, np.ndarray]], tasks: int, options: EdgeOptions
) -> Iterator[Tally]:
    """The tally after each round, until nothing more is asked for.

    Args:
      attempt: attempts wanted of each task -> (passes, attempts with a verdict) of each.
    Raises:
      RuntimeError: where the first round gave no verdict.
    """
    tally = nothing_known(tasks)
    while (asked := next_attempts(tally, options)).any():
        tally = tally.plus(asked, *attempt(asked))
        yield tally


def fit_prior(tally: Tally) -> tuple[float, float]:
    """The beta distribution that the tasks' pass rates come from, by their marginal likelihood (beta-binomial).

    The geometric mean of both parameters over a grid, weighed by likelihood and a wide normal prior of their
    logarithms, which keeps it finite where all tasks were passed or none.
    """
    grid = np.arange(math.log(PRIOR_BOUNDS[0]), math.log(PRIOR_BOUNDS[1]), PRIOR_GRID)
    log_a, log_b = np.meshgrid(grid, grid, indexing="ij")
    each = np.exp(grid)
    of_passes = _log_rising(each, tally.passes)[:, None] + _log_rising(each, tally.attempts - tally.passes)
    score = of_passes - _log_rising(np.exp(log_a) + np.exp(log_b), tally.attempts) - 0.5 * (log_a**2 + log_b**2)
    weight = np.exp(score - score.max())
    mean_a, mean_b = (float(np.sum(weight * x) / np.sum(weight)) for x in (log_a, log_b))
    return math.exp(mean_a), math.exp(mean_b)


def _log_rising(x: Float[np.ndarray, "*grid"], counts: Int[np.ndarray, " tasks"]) -> Float[np.ndarray, "*grid"]:
    """Σ log(Γ(x + n) / Γ(x)) over the tasks' counts n; a beta function's ratio is three of them."""
    values, times = np.unique(counts, return_counts=True)
    terms = scipy.special.gammaln(x[..., None] + values) - scipy.special.gammaln(x)[..., None]
    return terms @ times


@functools.lru_cache(maxsize=512)
def attempts_worth(
    price: float, prior: tuple[float, float], options: EdgeOptions
) -> Int[np.ndarray, "attempts passes"]:
    """Attempts until a task in state [attempts, passes] may stop being worth its price: 0 where it is not worth one.

    Backward induction over the number of attempts: V(n, s) = min(error(n, s), price + E V(n + 1, s')).
    """
    most = options.most_attempts
    error = _errors(prior, options)
    table = np.zeros((most + 1, most + 1), np.int64)
    value = error[most]
    for n in range(most - 1, -1, -1):
        passes = np.arange(n + 1)
        chance = (prior[0] + passes) / (prior[0] + prior[1] + n)
        further = price + chance * value[1 : n + 2] + (1 - chance) * value[: n + 1]
        now = error[n, : n + 1]
        until = 1 + np.minimum(table[n + 1, : n + 1], table[n + 1, 1 : n + 2])
        table[n, : n + 1] = np.where(further < now, until, 0)
        value = np.minimum(further, now)
    return table


@functools.lru_cache(maxsize=64)
def _errors(prior: tuple[float, float], options: EdgeOptions) -> Float[np.ndarray, "attempts passes"]:
    """Probability that the best classification in a state is wrong."""
    attempts, passes = np.indices((options.most_attempts + 1,) * 2)
    probability = _in_band(np.minimum(passes, attempts), attempts, prior, options)
    return np.minimum(probability, 1 - probability)


def _on_grid(prior: tuple[float, float]) -> tuple[float, float]:
    a, b = (math.exp(PRIOR_GRID * round(math.log(x) / PRIOR_GRID)) for x in prior)
    return a, b


def _in_band(passes: np.ndarray, attempts: np.ndarray, prior: tuple[float, float], options: EdgeOptions) -> np.ndarray:
    a, b = prior[0] + passes, prior[1] + attempts - passes
    return scipy.special.betainc(a, b, options.high) - scipy.special.betainc(a, b, options.low)
