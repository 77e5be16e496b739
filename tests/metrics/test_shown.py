"""Which samples are shown."""

import pytest

from rlx.metrics.shown import extremes, is_due, num_turns, shown_samples
from tests.records import make_group


def test_the_best_and_the_worst_of_groups_with_signal_come_first():
    groups = [make_group((0.0, 0.0), group=0), make_group((0.5, 0.0, 1.0), group=1), make_group((0.0, 1.0), group=2)]
    shown = shown_samples(groups, 20)
    assert [(s.group, s.index) for s in shown] == [(1, 2), (1, 1), (2, 1), (2, 0), (0, 0), (0, 1), (1, 0)]
    assert [(s.group, s.index) for s in shown_samples(groups, 3)] == [(1, 2), (1, 1), (2, 1)]
    assert shown_samples(groups, 0) == []
    assert shown_samples([], 4) == []


@pytest.mark.parametrize("update, due", [(1, False), (5, True), (10, True), (12, True), (11, False)])
def test_samples_are_due_now_and_then_and_at_the_end(update, due):
    assert is_due(update, every=5, last=12) is due


def record(update, task, reward, phase="train"):
    return {"update": update, "task": task, "reward": reward, "phase": phase}


def test_extremes_are_of_the_last_update_that_has_some():
    records = [record(1, "a", 1.0), record(1, "b", 0.0), record(2, "a", 0.0), record(2, "b", 0.0)]
    assert extremes(records, 2) == ([records[0]], [records[1]])
    assert extremes(records[2:], 1) == ([], [records[2]]), "nothing but one reward: no best, and some to look at"
    assert extremes([], 2) == ([], [])


def test_every_task_comes_before_a_second_sample_of_one():
    records = [record(1, task, reward) for reward in (1.0, 0.0) for task in ("a", "a", "b", "c")]
    best, worst = extremes(records, 3)
    assert [r["task"] for r in best] == [r["task"] for r in worst] == ["a", "b", "c"]


def test_evaluations_are_shown_where_nothing_was_trained():
    records = [record(0, "a", 1.0, "eval"), record(0, "b", 0.0, "eval")]
    assert extremes(records, 1) == ([records[0]], [records[1]])
    assert extremes([*records, record(1, "c", 1.0), record(1, "d", 0.5)], 1)[0][0]["task"] == "c"


@pytest.mark.parametrize(
    "versions, turns",
    [
        ([], 0),
        ([[0, 3, 5]], 1),
        ([[0, 3, 5], [1, 5, 7]], 1),
        ([[0, 3, 5], [1, 8, 9]], 2),
        ([[0, 3, 5], [0, 7, 8], [1, 8, 9], [1, 10, 12]], 3),
    ],
)
def test_turns_are_what_was_written_without_a_gap(versions, turns):
    assert num_turns({"versions": versions}) == turns
