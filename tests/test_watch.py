"""`rlx evaluate --watch`: a run is followed from beside it, through its end, its restart and its pruning."""

import json
import shutil
import signal
import threading
import time

import pytest

from rlx import evaluate, watch
from rlx.metrics.view import NotARun
from rlx.proxy.runs import read_rlx
from rlx.train import train
from rlx.watch import WatchOptions
from tests import tiny_run
from tests.tiny_run import start

SOON = WatchOptions(poll_s=0.05, patience_s=120.0)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("watch"))


@pytest.fixture(scope="module")
def finished(recipe):
    """Checkpoints of updates 2 and 3 are left."""
    config = tiny_run.config(recipe, learner__learning_rate=0.1, run__name="finished")
    return config.run.path, train(config)


def files(run):
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and "watch" not in p.relative_to(run).parts}


def test_what_is_there_is_tested_once_and_as_the_run_would(finished, capsys):
    run, summary = finished
    before = files(run)
    assert evaluate.main(["rlx evaluate", f"--watch={run}", "--poll=0.05"]) == 0
    records = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["label"] for r in records] == ["base", "update 2", "update 3"]
    after = summary["eval/evaluations"]["after"]
    assert records[-1]["eval/pass_rate"] == after["pass_rate"]
    assert records[0]["eval/pass_rate"] == summary["eval/pass_rate_base"]
    assert records[-1]["less_base"][0] == pytest.approx(after["pass_rate"] - summary["eval/pass_rate_base"])
    assert records[-1]["less_base"][1] < records[-1]["less_base"][0] < records[-1]["less_base"][2]
    assert watch.watch(run, SOON) == records
    assert len(tiny_run.records(run / "watch" / "evaluations.jsonl")) == 3
    assert files(run) == before
    assert [e.point.updates for e in read_rlx(run).evaluations] == [0, 2, 3]


def test_two_watchers_of_one_run_are_refused(finished):
    run, _ = finished
    (run / "watch").mkdir(exist_ok=True)
    with (run / "watch" / "lock").open("a") as lock:
        watch._lock(lock, run)
        with pytest.raises(RuntimeError, match="watched by another process already"):
            watch.watch(run, SOON)


def test_without_a_run_it_says_so(tmp_path):
    with pytest.raises(NotARun, match="no run has begun there"):
        watch.watch(tmp_path / "nothing", WatchOptions())


@pytest.mark.slow
def test_a_live_run_is_followed_through_its_restart_and_its_pruning(recipe):
    """The run keeps one checkpoint, is stopped in the middle and started again."""
    changes = {"run__name": "live", "learner__updates": 120, "checkpoint__keep": 1, "learner__learning_rate": 0.1}
    command = ("rlx.train", *tiny_run.arguments(recipe, **changes))
    run = recipe.parent / "runs" / "live"
    trainer = start(*command)
    watcher = start("rlx.evaluate", f"--watch={run}", "--poll=0.05", "--patience=400")
    try:
        wait_for(lambda: len(watched(run)) >= 3, trainer, watcher)
        trainer.send_signal(signal.SIGTERM)
        trainer.communicate(timeout=400)
        assert trainer.returncode == 75
        trainer = start(*command)
        assert trainer.wait(timeout=400) == 0, trainer.stderr.read()
        said, error = watcher.communicate(timeout=400)
    finally:
        trainer.kill()
        watcher.kill()
    assert watcher.returncode == 0, error
    records = watched(run)
    assert json.loads(said.splitlines()[-1]) == records
    versions = [r["version"] for r in records]
    assert len(set(versions)) == len(versions)
    assert (versions[0], records[-1]["update"]) == (-1, 120)
    assert tiny_run.records(run / "metrics.jsonl")[-1]["eval/pass_rate"] == records[-1]["eval/pass_rate"]


def watched(run):
    file = run / "watch" / "evaluations.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(done, *processes, limit=400.0):
    until = time.monotonic() + limit
    while not done():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.05)


def test_a_checkpoint_that_is_pruned_file_by_file_is_too_late(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoints" / "4"
    checkpoint.mkdir(parents=True)
    for name in "ab":
        (checkpoint / name).write_text(name)

    def gone(source, to):
        threading.Timer(0.2, shutil.rmtree, [checkpoint, True]).start()
        raise FileNotFoundError(source)

    with monkeypatch.context() as patched:
        patched.setattr(watch, "_link", gone)
        assert not watch.hold(checkpoint, tmp_path / "held")
    checkpoint.mkdir()
    assert watch.hold(checkpoint, tmp_path / "held")
