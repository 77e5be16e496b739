import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from rlx.metrics.statistics import (
    bootstrap_interval,
    kendall_tau_b,
    no_signal_probability,
    pass_at_k,
    spearman,
    wilson_interval,
)


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(attempts):
    for successes, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        passed = [i < successes for i in range(attempts)]
        subsets = [any(subset) for subset in itertools.combinations(passed, k)]
        assert pass_at_k(attempts, successes, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    p, attempts, k = 0.3, 6, 3
    expected = sum(scipy.stats.binom.pmf(c, attempts, p) * pass_at_k(attempts, c, k) for c in range(attempts + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize("arguments", [(8, 9, 1), (8, -1, 1), (8, 1, 9), (8, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(arguments):
    with pytest.raises(ValueError, match="attempt"):
        pass_at_k(*arguments)


@given(st.integers(1, 60), st.data(), st.sampled_from([0.5, 0.9, 0.95]))
def test_wilson_interval_solves_the_score_equation(attempts, data, confidence):
    successes = data.draw(st.integers(0, attempts))
    low, high = wilson_interval(successes, attempts, confidence)
    rate, z = successes / attempts, scipy.stats.norm.ppf((1 + confidence) / 2)
    assert 0 <= low <= rate <= high <= 1
    for bound in (low, high):
        assert abs(rate - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / attempts), abs=1e-7)


def test_wilson_interval_refuses_no_attempts_and_a_percentage():
    with pytest.raises(ValueError, match="at least one attempt"):
        wilson_interval(0, 0, 0.95)
    with pytest.raises(ValueError, match=r"0\.95, got 95"):
        wilson_interval(1, 2, 95)


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_no_signal_probability_sums_over_the_outcomes(group_size):
    p, total = 0.3, 0.0
    for outcome in itertools.product((0, 1), repeat=group_size):
        if len(set(outcome)) == 1:
            total += math.prod(p if passed else 1 - p for passed in outcome)
    assert no_signal_probability(p, group_size) == pytest.approx(total, abs=1e-12)


def test_no_signal_probability_refuses_what_is_no_rate():
    with pytest.raises(ValueError, match=r"got 1\.5"):
        no_signal_probability(1.5, 8)
    with pytest.raises(ValueError, match="group_size = 0"):
        no_signal_probability(0.5, 0)


def test_kendall_tau_b_by_its_definition():
    x, y = np.array([1.0, 2.0, 2.0, 4.0, 5.0]), np.array([1.0, 3.0, 2.0, 2.0, 9.0])
    pairs = list(itertools.combinations(range(5), 2))
    agreement = sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs)
    untied = [sum(v[i] != v[j] for i, j in pairs) for v in (x, y)]
    assert kendall_tau_b(x, y) == pytest.approx(agreement / math.sqrt(untied[0] * untied[1]))


def test_spearman_is_pearson_of_the_ranks():
    x, y = np.array([0.1, 5.0, 5.0, 7.0, -1.0]), np.array([3, 4, 8, 1, 0])
    ranks = scipy.stats.rankdata(x), scipy.stats.rankdata(y)
    assert spearman(x, y) == pytest.approx(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize("correlation", [kendall_tau_b, spearman])
def test_rank_correlations_at_their_ends(correlation):
    x = np.array([3.0, 1.0, 2.0])
    assert correlation(x, np.exp(x)) == pytest.approx(1.0)
    assert correlation(x, -x) == pytest.approx(-1.0)
    assert math.isnan(correlation(x, np.ones(3)))
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        correlation(x, x[:2])


def test_bootstrap_interval_of_one_axis_agrees_with_scipy():
    values = np.random.default_rng(0).normal(size=40)
    low, high = bootstrap_interval(values, np.mean, 0.9, seed=1, resamples=4000)
    scipys = scipy.stats.bootstrap((values,), np.mean, confidence_level=0.9, method="percentile", rng=2)
    assert (low, high) == pytest.approx(tuple(scipys.confidence_interval), abs=0.03)


def test_bootstrap_interval_draws_seeds_as_well_as_tasks():
    seeds, tasks = np.array([-1.0, 0.0, 1.0]), np.linspace(-0.1, 0.1, 30)
    both = bootstrap_interval(seeds[:, None] + tasks, np.mean, 0.95, seed=0, resamples=500)
    tasks_only = bootstrap_interval((seeds[:, None] + tasks).mean(axis=0), np.mean, 0.95, seed=0, resamples=500)
    assert both[1] - both[0] > 10 * (tasks_only[1] - tasks_only[0])


def test_bootstrap_interval_is_a_function_of_its_seed():
    values = np.arange(10.0)
    first, again, other = (bootstrap_interval(values, np.mean, 0.9, seed=s, resamples=50) for s in (3, 3, 4))
    assert first == again != other


def test_bootstrap_interval_refuses_no_values():
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        bootstrap_interval(np.array([]), np.mean, 0.9, seed=0)
