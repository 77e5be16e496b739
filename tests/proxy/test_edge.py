"""The edge of what a policy can do: classification, adaptive attempts, the stated error, the split."""

import numpy as np
import pytest
import scipy.stats

from rlx.proxy.edge import EdgeOptions, Tally, attempts_worth, classify, fit_prior, next_attempts, nothing_known, rounds
from rlx.proxy.split import SplitOptions, evidence, report, split, without_verdict

BAND = EdgeOptions(error=0.1)


def sampled(rng, rates):
    return lambda asked: (rng.binomial(asked, rates), asked)


def last(tallies) -> Tally:
    *_, tally = tallies
    return tally


def test_the_prior_is_that_of_the_tasks():
    rng = np.random.default_rng(0)
    attempts = rng.integers(2, 40, 3000)
    a, b = fit_prior(Tally(rng.binomial(attempts, rng.beta(0.4, 0.8, 3000)), attempts))
    assert (a, b) == (pytest.approx(0.4, rel=0.15), pytest.approx(0.8, rel=0.15))


def test_clear_tasks_stop_early_and_a_task_on_the_border_late():
    """By definition of the table: the state after as many attempts as it says may be one to stop in."""
    table = attempts_worth(1e-3, (1.0, 1.0), BAND)
    assert table[4, 2] == 0, "half of the attempts pass"
    assert table[64, 0] == 0, "none passes"
    assert table[20, 2] > 0, "a tenth passes"
    for n, s in ((4, 0), (8, 1), (20, 2)):
        k = table[n, s]
        assert all(table[n + m, s + j] > 0 for m in range(k) for j in range(m + 1))
        assert any(table[n + k, s + j] == 0 for j in range(k + 1))


def test_every_task_gets_the_first_attempts_and_none_more_than_most():
    options = EdgeOptions(first_attempts=3, most_attempts=5, error=0.01)
    assert next_attempts(nothing_known(4), options).tolist() == [3, 3, 3, 3]
    rng = np.random.default_rng(0)
    tally = last(rounds(sampled(rng, rng.uniform(size=50)), 50, options))
    assert tally.attempts.max() <= 5


def test_a_task_that_cannot_be_graded_is_given_up_and_reported(tmp_path):
    """It is asked for a second time alone, a round without any verdict; the rest goes on as if it were not there."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.4, 0.4, 20)
    graded = np.arange(20) != 7
    asked_of_it = []

    def attempt(asked):
        asked_of_it.append(int(asked[7]))
        return rng.binomial(asked, rates) * graded, asked * graded

    tally = last(rounds(attempt, 20, BAND))
    assert [n for n in asked_of_it if n] == [4, 4]
    assert (tally.attempts[7], int(tally.given_up.sum())) == (0, 1)
    verdicts = classify(tally, BAND)
    assert verdicts.expected_error <= BAND.error
    tasks = [(f"a/{i}", "a") for i in range(20)]
    rows = evidence(tasks, tally, np.zeros(20), verdicts, group_size=8)
    assert len(rows) == 19
    left = without_verdict(tasks, tally)
    assert left == ["a/7"]
    written = report(rows, verdicts, split(rows, SplitOptions()), BAND, {}, left)
    assert written.record["without_verdict"] == ["a/7"]
    assert any("1 tasks (a/7)" in line for line in written.lines)


def test_a_grader_that_fails_now_and_then_only_costs_attempts():
    rng = np.random.default_rng(1)
    tally = last(rounds(lambda asked: (np.zeros_like(asked), rng.binomial(asked, 0.7)), 10, BAND))
    assert tally.attempts.min() >= BAND.first_attempts
    assert not tally.given_up.any()


def test_graders_that_all_fail_are_an_error():
    with pytest.raises(RuntimeError, match="none of 40 attempts got a verdict"):
        last(rounds(lambda asked: (np.zeros_like(asked), np.zeros_like(asked)), 10, BAND))


def test_the_posterior_is_the_beta_distribution_s():
    tally = Tally(np.array([0, 3, 9]), np.array([4, 5, 9]))
    found = classify(tally, BAND)
    a, b = found.prior
    expected = [
        scipy.stats.beta.cdf(0.9, a + s, b + n - s) - scipy.stats.beta.cdf(0.1, a + s, b + n - s)
        for s, n in zip(tally.passes, tally.attempts)
    ]
    np.testing.assert_allclose(found.in_band, expected)
    assert found.is_edge.tolist() == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("error, seeds", [(0.1, 200), (0.05, 40)])
def test_the_stated_error_holds_with_far_fewer_attempts_than_a_fixed_number(error, seeds):
    """Each seed has 100 tasks with pass rates from Beta(0.4, 0.4), against the best classification after n attempts."""
    options, wrong, spent = EdgeOptions(error=error), [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        rates = rng.beta(0.4, 0.4, 100)
        tally = last(rounds(sampled(rng, rates), 100, options))
        is_edge = (rates >= options.low) & (rates <= options.high)
        wrong.append(np.mean(classify(tally, options).is_edge != is_edge))
        spent.append(tally.attempts.mean())
    fixed = next(n for n in range(1, 400) if fixed_error(n, options) <= error)
    print(f"error {np.mean(wrong):.4f} with {np.mean(spent):.1f} attempts a task; a fixed number needs {fixed}")
    assert np.mean(wrong) <= error
    assert np.mean(spent) <= 0.6 * fixed


def fixed_error(attempts: int, options: EdgeOptions) -> float:
    """Exact expected share misclassified after `attempts` at each task, when the prior is known."""
    passes = np.arange(attempts + 1)
    posterior = scipy.stats.beta(0.4 + passes, 0.4 + attempts - passes)
    inside = posterior.cdf(options.high) - posterior.cdf(options.low)
    return float(scipy.stats.betabinom.pmf(passes, attempts, 0.4, 0.4) @ np.minimum(inside, 1 - inside))


@pytest.fixture
def rows():
    """Twelve tasks of three sources; in each one hopeless, one solved and two on the edge."""
    tally = Tally(np.tile([0, 16, 8, 4], 3), np.full(12, 16))
    tasks = [(f"{source}/{i}", source) for source in "abc" for i in range(4)]
    return evidence(tasks, tally, np.full(12, 4), classify(tally, BAND), group_size=8)


def test_evidence_says_what_it_rests_on(rows):
    hopeless, _, half, quarter = rows[:4]
    assert (hopeless.is_edge, half.is_edge, quarter.is_edge) == (False, True, True)
    assert half.no_signal == pytest.approx(2 * 0.5**8)
    assert hopeless.no_signal == 1.0
    assert half.low < half.pass_rate < half.high
    assert half.limited == 0.25


def test_the_split_keeps_new_sources_out_of_training(rows):
    parts = split(rows, SplitOptions(held_out_similar=1, held_out_new=2))
    assert (len(parts.train), len(parts.held_out_similar), len(parts.held_out_new)) == (3, 1, 2)
    new = {task[0] for task in parts.held_out_new}
    assert not new & {task[0] for task in (*parts.train, *parts.held_out_similar)}
    assert split(rows, SplitOptions(train=1)).train == ("a/2",), "the most signal first"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"held_out_similar": 6}, "there are 6 edge tasks of other sources"),
        ({"train": -1}, "0 or more"),
    ],
)
def test_a_split_that_is_impossible_is_refused(rows, change, words):
    with pytest.raises(ValueError, match=words):
        split(rows, SplitOptions(**change))


def test_measurements_are_kept_where_no_task_is_on_the_edge(rows):
    clear = [row for row in rows if not row.is_edge]
    with pytest.raises(ValueError, match=r"of 6 tasks 3 never passed, 3 always, 0 now and then\. Take easier"):
        split(clear, SplitOptions())
    verdicts = classify(Tally(np.tile([0, 16], 3), np.full(6, 16)), BAND)
    found = report(clear, verdicts, None, BAND, {})
    assert "no split was made" in found.lines
    assert len(found.record["evidence"]) == 6
    assert "train" not in found.record, "rlx train would take it for a split"


def test_new_tasks_need_a_second_source(rows):
    with pytest.raises(ValueError, match=r"edge tasks are of 1 source"):
        split(rows[:4], SplitOptions(held_out_new=1))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"low": 0.9, "high": 0.1}, r"band \[0.9, 0.1\]"),
        ({"error": 0.0}, "error = 0.0"),
        ({"first_attempts": 0}, "first_attempts = 0"),
        ({"at_once": 0}, "at_once = 0"),
    ],
)
def test_options_are_checked(change, words):
    with pytest.raises(ValueError, match=words):
        EdgeOptions(**change)


def test_the_report_shows_no_rate_without_its_interval(rows, tmp_path):
    verdicts = classify(Tally(np.array([8]), np.array([16])), BAND)
    written = report(rows, verdicts, split(rows, SplitOptions()), BAND, {"model": "m"}).write(tmp_path, "edge")
    assert [path.name for path in written] == ["edge.json", "edge.md", "edge.html", "edge.png"]
    text = (tmp_path / "edge.md").read_text()
    assert "0.500 [0.254, 0.746] of 12 tasks are edge tasks" in text
    assert "| a/2 | 8 of 16 | 0.500 [0.280, 0.720] |" in text
