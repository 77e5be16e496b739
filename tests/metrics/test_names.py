import re

import pytest

from rlx.metrics.names import GROUPS, METRICS, check_names, find_metric


def test_names_are_unique_and_one_scheme():
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+/([a-z]+/)?[a-z0-9_]*(\{[a-z]+\}[a-z0-9_]*)?", metric.name), metric.name
        assert metric.group in GROUPS, metric.name
        assert metric.unit
        assert metric.meaning


def test_every_group_has_a_metric():
    assert {m.group for m in METRICS} == set(GROUPS)


def test_rows_of_one_group_stay_together():
    order = list(dict.fromkeys(m.group for m in METRICS))
    runs = [m.group for m, before in zip(METRICS[1:], METRICS) if m.group != before.group]
    assert len(runs) == len(order) - 1


@pytest.mark.parametrize(
    "name",
    [
        "reward/mean",
        "eval/pass_at_8",
        "response/stop_reason_length",
        "offpolicy/ess_age_2",
        "ledger/tokens_failed_grader_error",
    ],
)
def test_known_names_pass(name):
    check_names([name])


def test_unknown_names_are_refused_together_with_the_nearest():
    with pytest.raises(ValueError, match=r"'reward/meen' \(nearest: 'reward/mean'\).*'zzz'"):
        check_names(["reward/mean", "reward/meen", "zzz"])


def test_a_placeholder_is_not_empty_and_has_no_slash():
    assert find_metric("eval/pass_at_") is None
    assert find_metric("eval/pass_at_1/2") is None


def test_a_literal_row_wins_over_a_placeholder():
    found = find_metric("eval/pass_rate_low")
    assert found is not None
    assert found.name == "eval/pass_rate_low"
    source = find_metric("eval/pass_rate_chain_sum")
    assert source is not None
    assert source.name == "eval/pass_rate_{source}"
