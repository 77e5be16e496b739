"""Reading a run's directory: complete, running, stopped, damaged, none."""

import json
import math
import os
import socket

import pytest

from rlx.metrics.view import NotARun, number, read_run, read_samples, runs_below, setting
from tests import run_directory, tiny_run


@pytest.fixture
def run(tmp_path):
    return run_directory.write(tiny_run.write(tmp_path))


def test_a_complete_run(run):
    view = read_run(run)
    assert view.state == "complete"
    assert view.series("reward/pass_rate") == [(u, u / 4) for u in (1, 2, 3, 4)]
    assert view.series("policy/loss") == []
    assert list(view.evaluations) == ["base", "after"]
    assert view.ledger.total == (64, 16, 8)
    assert setting(view.config, "learner.updates") == 4
    assert setting(view.config, "learner.not_there_yet") is None
    assert len(list(read_samples(run))) == 2 + 4 * 4 + 2


def test_a_run_is_running_while_its_process_lives(run):
    (run / "summary.json").unlink()
    assert read_run(run).state == "stopped"
    (run / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert read_run(run).state == "running"
    assert read_run(run).writer == f"process {os.getpid()}"
    (run / "lock").write_text(f"process {os.getpid()} on another-{socket.gethostname()}\n")
    assert read_run(run).state == "stopped"


def test_numbers_that_json_lacks_are_read(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"update": 5, "reward/pass_rate": "NaN"}\n{"update": 6, "reward/pass_rate": "Infinity"}\n')
    assert len(read_run(run).updates) == 6
    assert [update for update, _ in read_run(run).series("reward/pass_rate")] == [1, 2, 3, 4]
    assert math.isnan(number(None))
    assert number("-Infinity") == -math.inf


def test_a_line_that_is_being_written_is_left_out(run):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"update": 5, "rew')
    assert len(read_run(run).updates) == 4
    assert len(list(read_samples(run))) == 20


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.json", "summary.json", "ledger.json"])
def test_a_damaged_file_is_named(run, name):
    whole = (run / name).read_text()
    (run / name).write_text("not json\n" + whole)
    with pytest.raises(ValueError, match=rf"{name}.*damaged"):
        list(read_samples(run)) if name == "samples.jsonl" else read_run(run)


def test_what_is_no_run_is_said_with_what_there_is(run, tmp_path):
    with pytest.raises(NotARun, match=r"runs/tinny does not exist; the nearest run is .*runs/tiny$"):
        read_run(run.with_name("tinny"))
    with pytest.raises(NotARun, match=r"runs holds runs and is none itself; name one of them: .*runs/tiny$"):
        read_run(run.parent)
    with pytest.raises(NotARun, match=r"model is no directory of a run: it has no config.json of one; a run's"):
        read_run(tmp_path / "model")
    with pytest.raises(NotARun, match=r"xyzzy does not exist; there are .*runs/tiny$"):
        read_run(run.with_name("xyzzy"))
    assert runs_below(run.parent) == [run]
    assert runs_below(tmp_path / "nothing") == []


def test_a_run_that_loads_its_parts_has_nothing_to_show(tmp_path):
    (tmp_path / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with pytest.raises(NotARun, match="the run is just starting"):
        read_run(tmp_path)


def test_a_run_without_records_has_a_view(run):
    for name in ("metrics.jsonl", "samples.jsonl", "ledger.json", "summary.json"):
        (run / name).unlink()
    view = read_run(run)
    assert (view.updates, view.evaluations, view.ledger, view.state) == ([], {}, None, "stopped")
    assert list(read_samples(run)) == []
    assert json.loads((run / "config.json").read_text()) == view.config
