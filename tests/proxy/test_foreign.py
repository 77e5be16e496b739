"""Runs of other stacks: event folders and exports through a mapping file."""

import json
import math

import pytest

from rlx import agree, compare
from rlx.metrics.tensorboard import TensorBoard
from rlx.proxy.foreign import MappingError, read_mapping, read_runs
from tests.proxy import made_runs

METRICS = {"reward/mean": "train/reward", "eval/pass_rate": "val/acc"}


def mapping(tmp_path, **keys):
    path = tmp_path / "mapping.json"
    path.write_text(json.dumps({"metrics": METRICS, "eval_attempts": 100, "eval_tasks": 25, "model": "theirs", **keys}))
    return path


@pytest.fixture
def events(tmp_path):
    """Two runs below one folder, as another trainer writes them."""
    for name, rise in (("a", 0.5), ("b", 0.1)):
        with TensorBoard(tmp_path / "tb" / name, -1, {}) as board:
            for step in range(1, 11):
                board.scalars({"train/reward": rise * step / 10, "seen": 500.0 * step}, step)
                if step % 5 == 0:
                    board.scalars({"val/acc": 0.2 + rise * step / 10}, step)
    return tmp_path / "tb"


def test_event_folders(tmp_path, events):
    runs = read_runs(events, read_mapping(mapping(tmp_path, tokens="seen")))
    assert [(r.name, r.model, r.state) for r in runs] == [("a", "theirs", "foreign"), ("b", "theirs", "foreign")]
    last = runs[0].curves["reward/mean"][-1]
    assert (last.updates, last.tokens, last.value) == (10, 5000, pytest.approx(0.5))
    assert [(e.point.updates, e.attempts) for e in runs[0].evaluations] == [(5, 100), (10, 100)]
    assert runs[0].evaluations[-1].low < 0.7 < runs[0].evaluations[-1].high


def test_without_a_mapping_event_folders_are_read_as_they_are(events):
    assert set(read_runs(events)[0].curves) == {"train/reward", "seen", "val/acc"}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_exports(tmp_path, kind):
    rows = [
        {"step": s, "_runtime": 3.0 * s, "who": who, "train/reward": 0.1 * s, "val/acc": 0.3 if s == 10 else ""}
        for who in ("x", "y")
        for s in range(1, 11)
    ]
    write = made_runs.write_csv if kind == "csv" else made_runs.write_jsonl
    file = write(tmp_path / f"export.{kind}", rows)
    runs = read_runs(file, read_mapping(mapping(tmp_path, run="who", seconds="_runtime")))
    assert [run.name for run in runs] == ["x", "y"]
    assert runs[0].curves["reward/mean"][-1].seconds == 30.0
    assert math.isnan(runs[0].curves["reward/mean"][-1].tokens)
    assert [e.point.value for e in runs[0].evaluations] == [0.3]


def test_theirs_beside_ours_on_one_page(tmp_path, events, capsys):
    ours = made_runs.write(tmp_path, "ours")
    file = mapping(tmp_path)
    assert compare.main([str(ours), str(events), f"--mapping={file}", f"--to={tmp_path / 'out'}", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [run["model"] for run in record["runs"]] == ["small", "theirs", "theirs"]
    assert record["runs"][1]["pass_rate_interval"] == pytest.approx([0.604, 0.781], abs=1e-3)


def test_agree_through_a_mapping(tmp_path, events, capsys):
    about = {name: {"settings": {"lr": lr}, "seed": 0} for name, lr in (("a", 1e-3), ("b", 1e-5))}
    file = mapping(tmp_path, runs=about)
    assert agree.main([str(events), str(events), f"--mapping={file}", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["configurations"] == ["lr=0.001", "lr=1e-05"]
    assert (record["kendall_tau"], record["kendall_interval"]) == (1.0, [-1.0, 1.0]), "one seed decides nothing"


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no such mapping file"),
        ("{", "not JSON"),
        ("{}", r'needs an object with "metrics"'),
        ('{"metrics": {}, "stpe": "x"}', "unknown key 'stpe'; did you mean 'step'"),
        ('{"metrics": {"reward/men": "x"}}', "nearest: 'reward/mean'"),
    ],
)
def test_a_wrong_mapping_says_so(tmp_path, content, words):
    path = tmp_path / "mapping.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(MappingError, match=words):
        read_mapping(path)


def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path):
    file = made_runs.write_csv(tmp_path / "e.csv", [{"step": 1, "train/rewards": 1, "val/acc": 1}])
    with pytest.raises(MappingError, match=r"has no 'train/reward', .* nearest is 'train/rewards'"):
        read_runs(file, read_mapping(mapping(tmp_path)))
    with pytest.raises(MappingError, match="give --mapping FILE"):
        read_runs(file)
    file = made_runs.write_csv(tmp_path / "e.csv", [{"step": 1, "train/reward": "high", "val/acc": 1}])
    with pytest.raises(MappingError, match='"high" is no number'):
        read_runs(file, read_mapping(mapping(tmp_path)))
