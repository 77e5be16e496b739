"""The search of lambda: its order, its end, and what it refuses. Trials are given, none is trained."""

import pytest

from rlx.config.errors import ConfigError
from rlx.distillation.calibrate import Trial, calibrate, described
from rlx.proxy.calibration import fit_lambda
from tests import tiny_run

RATES = {2.0: 0.50, 1.0: 0.60, 0.5: 0.70, 0.25: 0.65, 0.1: 0.20}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("calibrate"))


def config_of(recipe, **changes):
    given = {"objective__distill__form": "sampled", "objective__loss": "reinforce", "objective__centering": "off"}
    return tiny_run.config(recipe, frozen__signals=("signals/s",), **{**given, **changes})


def trial_of(config):
    lam = config.objective.distill.lam
    return Trial(lam, RATES[lam], RATES[lam] - 0.06, RATES[lam] + 0.06, "it repeats itself" if lam < 0.2 else "")


def test_it_goes_down_until_one_collapses_and_says_which_was_best(recipe):
    found = calibrate(config_of(recipe), [0.1, 1.0, 0.5, 2.0, 0.25], 7, trial_of)
    assert [t["lam"] for t in found["trials"]] == [2.0, 1.0, 0.5, 0.25, 0.1]
    assert found["best"] == 0.5
    assert 0.25 < found["fitted"] < 1.0
    assert found["stopped"] == "lambda 0.1: it repeats itself"


def test_the_score_of_one_that_collapsed_counts_for_nothing(recipe):
    """It may be from before the collapse."""
    rates = {2.0: (0.5, ""), 1.0: (0.6, ""), 0.5: (0.9, "it repeats itself")}

    def collapsing(config):
        rate, why = rates[config.objective.distill.lam]
        return Trial(config.objective.distill.lam, rate, rate - 0.06, rate + 0.06, why)

    found = calibrate(config_of(recipe), list(rates), 7, collapsing)
    assert (found["best"], found["pass_rate"], found["fitted"]) == (1.0, 0.6, None)
    rates[2.0] = (0.5, "it repeats itself")
    found = calibrate(config_of(recipe), list(rates), 7, collapsing)
    assert (found["best"], len(found["trials"])) == (None, 1)
    assert "try larger ones" in described(found)[-1]


@pytest.mark.parametrize("above, named", [(0.0, False), (0.02, True)])
def test_lambdas_that_cannot_be_told_apart_are_said_to_be(recipe, above, named):
    def level(config):
        lam = config.objective.distill.lam
        return Trial(lam, 0.3 + above * lam, 0.1, 0.5, "")

    found = calibrate(config_of(recipe), [2.0, 1.0, 0.5], 7, level)
    assert (found["best"], found["tied"], found["fitted"] is None) == (2.0, [1.0, 0.5], not named)
    lines = described(found)
    assert ("cannot be told apart" in lines[-1], "best lambda 2" in lines[-1]) == (not named, named)
    assert "not clearly better than 1, 0.5" in lines[-2] or not named


def test_it_ends_where_the_pass_rate_is_clearly_lower(recipe):
    asked = []

    def falling(config):
        lam = config.objective.distill.lam
        asked.append((config.run.name, config.learner.updates))
        return Trial(lam, lam / 4, lam / 4 - 0.06, lam / 4 + 0.06, "")

    found = calibrate(config_of(recipe), [2.0, 1.5, 1.0, 0.5], 7, falling)
    assert asked == [("lambda=2", 7), ("lambda=1_5", 7)]
    assert [t["lam"] for t in found["trials"]] == [2.0, 1.5]
    assert "is below the 0.500 of 2" in found["stopped"]


@pytest.mark.parametrize("lams, said", [([1.0, 0.0], "lam = 0.0"), ([1.0, 1.0], "different ones"), ([], "different")])
def test_lambdas_that_cannot_be_are_refused_before_anything_runs(recipe, lams, said):
    with pytest.raises(ConfigError, match=said):
        calibrate(config_of(recipe), lams, 7, lambda config: pytest.fail("ran"))


def test_a_fit_lies_at_the_top_with_an_interval_over_seeds():
    fit = fit_lambda({0.25: [0.5, 0.52], 0.5: [0.68, 0.7], 1.0: [0.7, 0.69], 2.0: [0.5, 0.53]})
    assert 0.5 < fit.best < 1.0
    assert fit.low <= fit.best <= fit.high
    assert fit_lambda({1.0: [0.5], 2.0: [0.6]}) is None
    edge = fit_lambda({0.5: [0.9], 1.0: [0.8], 2.0: [0.7]})
    assert edge.best == pytest.approx(0.5)
