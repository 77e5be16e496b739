"""Agreement of two rankings: the numbers against definitions, and coverage of the interval by simulation."""

import itertools
import json
import math

import numpy as np
import pytest
import scipy.stats

from rlx.metrics.jsonl import encode
from rlx.proxy.agreement import (
    agree,
    agree_over_tasks,
    attempts_to_decide,
    over_tasks,
    seeds_to_decide,
    study,
    win_probabilities,
)

NAMES = "abcdefghijkl"


def exact(values, noise=0.01):
    """Three seeds a configuration, so close together that every pair is decided."""
    return {name: [v - noise, v, v + noise] for name, v in zip(NAMES, values)}


def test_the_same_ranking_agrees_and_its_reverse_does_not():
    same = agree(exact([1, 2, 3, 4]), exact([10, 20, 30, 40]))
    assert (same.kendall_tau, same.spearman, same.pairwise_agreement) == pytest.approx((1, 1, 1))
    assert (same.kendall_interval, same.top1_agreement, same.undecided_pairs) == ((1.0, 1.0), 1.0, ())
    other = agree(exact([1, 2, 3, 4]), exact([4, 3, 2, 1]))
    assert (other.kendall_tau, other.kendall_interval) == (pytest.approx(-1), (-1.0, -1.0))
    assert other.pairwise_agreement == other.top1_agreement == other.top1_probability == 0.0
    assert {pair.verdict for pair in other.pairs} == {"disagree"}


def test_an_open_pair_may_be_either_way():
    """b and c are a hundredth apart with seeds half a point apart: 2 of the 6 pairs' share of tau is open, 1/3."""
    proxy = exact([1, 2, 2.001, 3]) | {"b": [1.8, 2.0, 2.2], "c": [1.8, 2.001, 2.2]}
    found = agree(exact([1, 2, 3, 4]), proxy)
    assert found.undecided_pairs == (("b", "c"),)
    assert found.kendall_interval == pytest.approx((2 / 3, 1))
    (pair,) = [p for p in found.pairs if p.verdict == "not decided"]
    assert pair.proxy_interval[0] < 0 < pair.proxy_interval[1]
    assert pair.proxy_seeds_to_decide is None
    assert pair.target_seeds_to_decide == 2


def test_one_seed_decides_nothing():
    found = agree({"a": [1.0], "b": [2.0]}, {"a": [1.0], "b": [2.0]})
    assert (found.kendall_interval, found.undecided_pairs) == ((-1.0, 1.0), (("a", "b"),))
    assert found.kendall_tau == 1.0
    assert json.loads(encode(found.to_dict()))["kendall_interval"] == [-1.0, 1.0]


def test_of_two_configurations_with_equal_variances_it_is_student_s_interval():
    """With equal sample variances the moderated one is the common one; 4 degrees of freedom, all that there are."""
    scores = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]
    expected = scipy.stats.ttest_ind(*scores).confidence_interval(0.95)
    found = study(scores, 0.95)
    assert found.difference - found.half_width == pytest.approx(expected.low)
    assert found.difference + found.half_width == pytest.approx(expected.high)


def test_a_constant_ranking_has_no_order_to_agree_with():
    found = agree(exact([1, 2, 3]), {name: [1.0, 1.0] for name in NAMES[:3]})
    assert math.isnan(found.kendall_tau)
    assert math.isnan(found.spearman)
    assert found.kendall_interval == (-1.0, 1.0)


def test_seeds_that_decide_a_pair_have_the_power_that_is_stated():
    rng = np.random.default_rng(0)
    seeds = seeds_to_decide(0.5, 1.0, 0.95)
    assert seeds == 63
    draws = rng.normal(size=(2000, 2, seeds)) + np.array([[0.5], [0.0]])
    wins = scipy.stats.ttest_ind(draws[:, 0], draws[:, 1], axis=1).pvalue < 0.05
    assert np.mean(wins) == pytest.approx(0.8, abs=0.03)


def test_attempts_that_decide_two_rates_have_the_power_that_is_stated():
    attempts = attempts_to_decide(0.6, 0.5, 0.95)
    assert attempts == 385
    passes = np.random.default_rng(0).binomial(attempts, [[0.6], [0.5]], (2, 4000)) / attempts
    error = np.sqrt((passes * (1 - passes)).sum(0) / attempts)
    assert np.mean(passes[0] - passes[1] > 1.96 * error) == pytest.approx(0.8, abs=0.03)
    assert attempts_to_decide(0.5, 0.5, 0.95) is None
    assert attempts_to_decide(0.5, 0.5001, 0.95) is None


def test_win_probabilities_are_mann_and_whitney_s():
    scores = [[1.0, 2.0, 3.0], [0.0, 2.0], [2.5, 2.5, 9.0, 1.0]]
    for found, (a, b) in zip(win_probabilities(scores), itertools.combinations(scores, 2)):
        assert found == pytest.approx(scipy.stats.mannwhitneyu(a, b).statistic / (len(a) * len(b)))


def test_over_tasks_no_pair_is_decided_that_hangs_on_one_task():
    """Both configurations pass ten tasks always but one: without that task there is no difference."""
    best, other = np.ones((3, 10)), np.ones((3, 10))
    other[:, 0] = 0.0
    scores = {"a": best, "b": other + 0.001 * np.arange(3)[:, None]}
    over_seeds = agree(*[{name: v.mean(1).tolist() for name, v in scores.items()}] * 2)
    assert over_seeds.undecided_pairs == ()
    found = agree_over_tasks(scores, scores)
    assert (found.undecided_pairs, found.kendall_interval) == ((("a", "b"),), (-1.0, 1.0))
    assert found.target_means == over_seeds.target_means
    with pytest.raises(ValueError, match="evaluated on the same tasks"):
        agree_over_tasks(scores | {"b": np.ones((3, 4))}, scores)


def test_over_tasks_the_interval_of_a_difference_covers_new_seeds_and_tasks():
    """Differences by seed (deviation 0.05) and by task (0.3) and noise of attempts; the truth is 0.1."""
    rng, hits = np.random.default_rng(0), []
    for _ in range(300):
        seeds = 0.05 * rng.normal(size=(2, 4, 1))
        tasks = 0.3 * rng.normal(size=(2, 1, 20))
        scores = np.array([0.1, 0.0])[:, None, None] + seeds + tasks + 0.2 * rng.normal(size=(2, 4, 20))
        found = over_tasks(study(scores.mean(2).tolist(), 0.95), list(scores), 0.95)
        hits.append(abs(found.difference[0] - 0.1) <= found.half_width[0])
    assert np.mean(hits) >= 0.93


@pytest.mark.parametrize(
    "target, proxy, words",
    [
        ({"a": [1.0], "b": [2.0]}, {"a": [1.0], "c": [2.0]}, "'b' only of the target, 'c' only of the proxy"),
        ({"a": [1.0]}, {"a": [1.0]}, "at least two configurations, got 1"),
        ({"a": [1.0], "b": []}, {"a": [1.0], "b": [1.0]}, "target's configuration 'b' has no scores"),
        ({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [math.nan]}, "proxy's configuration 'b' has a score that is not"),
    ],
)
def test_what_cannot_be_compared_is_refused(target, proxy, words):
    with pytest.raises(ValueError, match=words):
        agree(target, proxy)


@pytest.mark.slow
def test_the_interval_covers_the_true_tau_in_every_cell():
    """500 draws of normal scores in each of 36 cells. The mean width of each is in docs/proxy.md."""
    covered = {}
    for cell in itertools.product((8, 12), (3, 5, 10), (0.3, 1.0), (0.6, 0.9, 1.0)):
        covered[cell], width = coverage(*cell, draws=500)
        print("configurations {}, seeds {}, noise/spread {}, correlation {}:".format(*cell), covered[cell], width)
    assert {cell: c for cell, c in covered.items() if c < 0.93} == {}


def coverage(configurations: int, seeds: int, noise: float, correlation: float, draws: int) -> tuple[float, float]:
    """(coverage, mean width) of the 95 % interval of the true means' tau."""
    rng = np.random.default_rng([configurations, seeds, int(10 * noise), int(10 * correlation)])
    hits, widths = [], []
    for _ in range(draws):
        shared, own = rng.normal(size=(2, configurations))
        truth = (shared, correlation * shared + math.sqrt(1 - correlation**2) * own)
        scores = [means[:, None] + noise * rng.normal(size=(configurations, seeds)) for means in truth]
        target, proxy = ({name: row.tolist() for name, row in zip(NAMES, one)} for one in scores)
        low, high = agree(target, proxy, bootstrap=1).kendall_interval
        tau = scipy.stats.kendalltau(*truth).statistic
        hits.append(low - 1e-9 <= tau <= high + 1e-9)
        widths.append(high - low)
    return float(np.mean(hits)), float(np.mean(widths))
