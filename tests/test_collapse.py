import pytest

from rlx import collapse
from rlx.config.frozen import CollapseConfig

OFF = CollapseConfig(0.0, 0.0, 0.0, 0.0, 0.0, 2)
HEALTHY = {"policy/entropy": 1.0, "response/length_mean": 10.0, "response/repetition_fraction": 0.0}
EVALS = {"base": {"pass_rate": 0.5}, "before": {"pass_rate": 0.5}}


def bounds(**changes):
    return CollapseConfig(**{**vars(OFF), **changes})


def after(config, *updates, evals=EVALS):
    seen = {}
    for changes in ({}, *updates):
        collapse.observe(config, seen, HEALTHY | changes)
    return collapse.reason(config, seen, evals)


@pytest.mark.parametrize(
    "config, broken, named",
    [
        (bounds(entropy_low=0.1), {"policy/entropy": 0.01}, "entropy is 0.0100 nats, below 0.1"),
        (bounds(entropy_growth=3.0), {"policy/entropy": 3.5}, "more than 3.0 times the 1.000 of the first update"),
        (bounds(repetition=0.4), {"response/repetition_fraction": 0.5}, "0.50 of the 4-grams"),
        (bounds(length_factor=2.0), {"response/length_mean": 21.0}, "21.0 tokens, 10.0 at the first update"),
        (bounds(length_factor=2.0), {"response/length_mean": 4.0}, "4.0 tokens, 10.0 at the first update"),
    ],
)
def test_a_broken_bound_stops_after_so_many_updates_in_a_row(config, broken, named):
    assert after(config, broken) is None
    assert after(config, broken, {}, broken) is None
    why = after(config, broken, broken)
    assert named in why
    assert "2 updates in a row" in why
    assert "raise objective.distill.lam" in why
    assert after(OFF, broken, broken) is None


def test_a_held_out_pass_rate_that_fell_stops_at_once():
    fallen = EVALS | {"update 5": {"pass_rate": 0.25}}
    why = after(bounds(reward_drop=0.2), evals=fallen)
    assert "at update 5 the held-out pass rate is 0.250, 0.500 before" in why
    assert after(bounds(reward_drop=0.3), evals=fallen) is None
    assert after(OFF, evals=fallen) is None


def test_another_bound_judges_what_was_seen_last():
    """A run that is resumed with a bound that is off or wider goes on."""
    seen = {}
    for entropy in (1.0, 0.01, 0.01):
        collapse.observe(bounds(entropy_low=0.1), seen, HEALTHY | {"policy/entropy": entropy})
    assert "below 0.05" in collapse.reason(bounds(entropy_low=0.05), seen, EVALS)
    assert collapse.reason(bounds(entropy_low=0.001), seen, EVALS) is None
    assert collapse.reason(OFF, seen, EVALS) is None


def test_an_update_without_samples_says_nothing():
    seen = {}
    collapse.observe(bounds(entropy_low=0.1), seen, {"response/length_mean": 3.0})
    assert seen == {}
