"""Sweeps: which runs there are, what they are called, and that they are run once."""

import json
import subprocess

import pytest

from rlx import sweep as command
from rlx.config.axes import axis, grid
from rlx.config.errors import ConfigError
from rlx.config.parse import to_dict
from rlx.metrics.jsonl import write_json
from rlx.metrics.tensorboard import OUTCOMES
from rlx.proxy import sweep
from rlx.proxy.ranking import read_study
from tests import tiny_run

AXES = [("learner.learning_rate", ["0.1", "0.2"]), ("rollout.group_size", ["4", "8"])]


def test_a_grid_has_every_combination():
    rates = [("0.1", "4"), ("0.1", "8"), ("0.2", "4"), ("0.2", "8")]
    assert grid(AXES) == [{"learner.learning_rate": a, "rollout.group_size": b} for a, b in rates]


def test_one_at_a_time_starts_from_the_recipe():
    base = {"learner.learning_rate": "0.1", "rollout.group_size": "8"}
    points = sweep.one_at_a_time(AXES, base)
    assert [tuple(p.values()) for p in points] == [("0.1", "8"), ("0.2", "8"), ("0.1", "4")]


def test_whole_seeds_come_first():
    planned = sweep.plan(grid(AXES[:1]), range(2))
    assert [(p.label, p.seed) for p in planned] == [
        ("learning_rate=0.1", 0),
        ("learning_rate=0.2", 0),
        ("learning_rate=0.1", 1),
        ("learning_rate=0.2", 1),
    ]
    assert planned[0].changes == ["--config.learner.learning_rate=0.1", "--config.run.seed=0"]
    assert planned[0].run == "learning_rate=0.1_seed=0"


def test_a_name_must_tell_runs_apart():
    with pytest.raises(ValueError, match=r"two configurations of the sweep are called"):
        sweep.plan([{"model.path": "a/b"}, {"model.path": "a b"}], [0])
    with pytest.raises(ValueError, match="at least one configuration"):
        sweep.plan([], [0])


def test_an_axis_is_a_setting():
    assert axis("--axis", "producer.max_policy_lag=1,4") == ("producer.max_policy_lag", ["1", "4"])
    with pytest.raises(ConfigError, match=r"no such key; the nearest is config.producer.max_policy_lag"):
        axis("--axis", "producer.max_policy_lagg=1")
    with pytest.raises(ConfigError, match="give values"):
        axis("--axis", "max_policy_lag=")


@pytest.mark.parametrize("change", [{"learner__learning_rate": 0.2}, {"rollout__group_size": 4}, {"run__seed": 5}])
def test_a_run_that_was_made_otherwise_is_refused(tmp_path, change):
    """Its name is that of a run of the sweep, its settings are not."""
    recipe = tiny_run.write(tmp_path)
    words = ["rlx sweep", *tiny_run.arguments(recipe, run__name="s"), "--axis=learner.learning_rate=0.1", "--seeds=1"]
    made = tmp_path / "runs" / "s" / "learning_rate=0.1_seed=0"
    made.mkdir(parents=True)
    (made / "summary.json").write_text("{}")
    settings = {"learner__learning_rate": 0.1, "learner__updates": 7, "run__seed": 0}
    write_json(made / "config.json", to_dict(tiny_run.config(recipe, **settings)))
    assert command.main([*words, "--dry_run"]) == 0, "more or fewer updates are the same run"
    write_json(made / "config.json", to_dict(tiny_run.config(recipe, **settings | change)))
    key = next(iter(change)).replace("__", ".")
    with pytest.raises(ConfigError, match=f"config.{key} = .* was made with {next(iter(change.values()))}"):
        command.main([*words, "--dry_run"])


def test_a_complete_run_is_asked_whether_it_is(tmp_path, monkeypatch):
    """`rlx train` knows whether more updates are wanted than it has made."""
    (planned,) = sweep.plan([{"learner.learning_rate": "0.1"}], [0])
    (tmp_path / planned.run).mkdir()
    (tmp_path / planned.run / "summary.json").write_text("{}")
    started = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(command.subprocess, "run", lambda words, **_: started.append(words) or done)
    assert command.train([], tmp_path, planned)
    assert [words[1:4] for words in started] == [["-m", "rlx.launch", "train"]]


@pytest.mark.slow
def test_a_sweep_trains_each_run_once_and_agree_reads_it(tmp_path, capsys):
    recipe = tiny_run.write(tmp_path)
    words = ["rlx sweep", *tiny_run.arguments(recipe, run__name="s", learner__updates=1)]
    words += ["--axis=learner.learning_rate=0.01,0.1", "--seeds=1"]
    assert command.main(words) == 0
    directory = tmp_path / "runs" / "s"
    assert "2 of 2 runs complete" in capsys.readouterr().out
    stamps = made(directory)
    assert command.main(words) == 0
    assert made(directory) == stamps
    listed = json.loads((directory / "sweep.json").read_text())["runs"]
    assert [row["label"] for row in listed] == ["learning_rate=0.01", "learning_rate=0.1"]
    study = read_study(directory, None, "eval/pass_rate")
    assert (list(study.scores), study.runs) == (["learning_rate=0.01", "learning_rate=0.1"], 2)
    assert "eval/pass_rate" in OUTCOMES, "what TensorBoard compares the runs by"


def made(directory):
    """The files of runs and when they were written, but for what each call of the sweep writes."""
    own = ("sweep.json", command.LOG)
    return {p: p.stat().st_mtime_ns for p in directory.rglob("*") if p.is_file() and p.name not in own}


def test_a_wrong_configuration_is_refused_before_any_run(tmp_path, capsys):
    recipe = tiny_run.write(tmp_path)
    words = ["rlx sweep", *tiny_run.arguments(recipe), "--axis=learner.learning_rate=0.1,-1"]
    with pytest.raises(SystemExit):
        command.main(words)
    assert "learner.learning_rate = -1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_the_runs(tmp_path, capsys):
    recipe = tiny_run.write(tmp_path)
    words = ["rlx sweep", *tiny_run.arguments(recipe), "--axis=group_size=4,8", "--seeds=2", "--dry_run"]
    assert command.main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
