"""`rlx edge` on a model that passes some of its tasks now and then, and a run on the split that it writes."""

import json

import pytest

from rlx import edge
from rlx.envs.tasks import build_tasks
from tests import tiny_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Forty tasks whose answers are one of two digits that the model likes, or one of two that it does not."""
    home = tmp_path_factory.mktemp("edge")
    recipe = tiny_run.write(home)
    tiny_run.digit_tasks(home / "tasks.jsonl", answers="3719")
    words = ["rlx edge", *tiny_run.arguments(recipe), "--low=0.05", "--high=0.95", "--error=0.2", "--most=24"]
    assert edge.main([*words, "--held_out_similar=4", f"--to={home / 'out'}"]) == 0
    return recipe, home / "out" / "edge.json", json.loads((home / "out" / "edge.json").read_text())


def test_what_it_likes_is_on_the_edge_and_what_it_never_writes_is_not(found):
    _, _, record = found
    likes = {row["task"]: row for row in record["evidence"] if row["is_edge"]}
    assert 10 <= len(likes) <= 30
    assert record["expected_error"] <= 0.2
    assert all(row["low"] <= row["pass_rate"] <= row["high"] for row in record["evidence"])
    assert all(4 <= row["attempts"] <= 24 for row in record["evidence"])
    rates = {row["task"]: row["pass_rate"] for row in record["evidence"]}
    assert sum(rates.values()) > 0


def test_the_split_is_what_training_reads(found):
    recipe, file, record = found
    config = tiny_run.config(recipe, tasks__split=str(file))
    train, held_out = build_tasks(config.tasks)
    assert [t.id for t in train] == record["train"]
    assert [t.id for t in held_out] == record["held_out_similar"]
    assert len(held_out) == 4


def test_two_rounds_are_different_attempts(found):
    """A task that was asked again in a later round would else have the same samples twice."""
    _, _, record = found
    again = [row for row in record["evidence"] if row["attempts"] >= 12 and 0 < row["passes"] < row["attempts"]]
    assert again
