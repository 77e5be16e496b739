"""A run that was killed, or told to stop, ends in the same bits as one that was left alone."""

import json
import random
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from rlx import train
from rlx.interrupt import EXIT_PREEMPTED
from rlx.rollout.engine import EngineError
from tests import tiny_run
from tests.interrupted import interrupting

pytestmark = pytest.mark.slow

# Cold start, evaluations and checkpoints out of step with each other: every pair of neighbours occurs.
CHANGES = {"learner__updates": 8, "checkpoint__every": 2, "eval__every": 3, "sft__steps": 2}
UNREPEATABLE = ("time", "throughput", "system", "grader", "engine")  # groups of metrics


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resume")
    examples = [{"question": f"Digit {i}?", "response": str(i % 10)} for i in range(40, 80)]
    tiny_run.write_jsonl(directory / "sft.jsonl", examples)
    return tiny_run.write(directory)


def command(recipe: Path, name: str, **changes) -> list[str]:
    return tiny_run.arguments(
        recipe, **{**CHANGES, "sft__path": recipe.parent / "sft.jsonl", "run__name": name, **changes}
    )


def run_to_the_end(recipe: Path, name: str, **changes) -> Path:
    assert train.main(["rlx train", *command(recipe, name, **changes)]) == 0
    return recipe.parent / "runs" / name


@pytest.fixture(scope="module")
def undisturbed(recipe):
    """A run that was left alone."""
    return run_to_the_end(recipe, "undisturbed")


def metrics(run: Path) -> list[dict]:
    return [
        {
            name: value
            for name, value in record.items()
            if name.partition("/")[0] not in UNREPEATABLE and not name.endswith("_per_second")
        }
        for record in tiny_run.records(run / "metrics.jsonl")
    ]


def arrays(recipe: Path, run: Path) -> dict[str, np.ndarray]:
    """The learner's state in the newest checkpoint: parameters, optimizer, counters."""
    _, restored = tiny_run.newest_checkpoint(tiny_run.config(recipe, run__name=run.name))
    assert restored.step == CHANGES["learner__updates"]
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(restored.state)}


def assert_same_run(recipe: Path, run: Path, other: Path) -> None:
    """Equal to the bit, but for durations."""
    found, expected = arrays(recipe, run), arrays(recipe, other)
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name].tobytes() != expected[name].tobytes()} == set()
    assert metrics(run) == metrics(other)
    assert tiny_run.samples(run) == tiny_run.samples(other)
    for name in ("ledger.json", "adapter/adapter_model.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    summaries = [json.loads((r / "summary.json").read_text()) for r in (run, other)]
    for key in ("updates", "version", "eval/evaluations", "ledger"):
        assert summaries[0][key] == summaries[1][key], key


def test_the_same_command_is_the_same_run(recipe, undisturbed):
    """The comparison itself: it holds between two runs, and does not for another seed."""
    assert_same_run(recipe, run_to_the_end(recipe, "again"), undisturbed)
    other = run_to_the_end(recipe, "other", run__seed=1)
    assert metrics(other) != metrics(undisturbed)
    assert tiny_run.samples(other) != tiny_run.samples(undisturbed)
    pairs = zip(arrays(recipe, other).values(), arrays(recipe, undisturbed).values())
    assert any(a.tobytes() != b.tobytes() for a, b in pairs)


def test_a_run_killed_again_and_again_ends_in_the_same_bits(recipe, undisturbed):
    """SIGKILL in every phase at an occurrence chosen by the seed, then once at a moment that nobody chose."""
    rng = random.Random(0)
    arguments = command(recipe, "killed")
    occurrences = {"save": (2, 2), "rollout": (10, 25), "update": (3, 4), "record": (1, 2), "evaluation": (1, 1)}
    resumed = [kill_in(phase, rng.randint(*bounds), arguments) for phase, bounds in occurrences.items()]
    kill_soon_after_an_update(arguments, recipe.parent / "runs" / "killed" / "metrics.jsonl", rng)
    resumed.append(kill_in("finish", 1, arguments))
    assert resumed[0] is None, "the first process found nothing"
    assert len(set(resumed)) >= 3, f"the kills should be spread over the run, they came after {resumed}"
    assert_same_run(recipe, run_to_the_end(recipe, "killed"), undisturbed)


def kill_in(phase: str, count: int, arguments: list[str]) -> int | None:
    """SIGKILL in a phase of the run's next process. Returns the update that this process resumed after."""
    with tiny_run.start("tests.interrupted", "SIGKILL", phase, str(count), *arguments) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, f"{phase} {count}: {errors}"
    resumed = re.search(r"resumed after update (\d+);", errors)
    return int(resumed[1]) if resumed else None


def kill_soon_after_an_update(arguments: list[str], metrics_file: Path, rng: random.Random) -> None:
    """SIGKILL from outside, a random moment after the process has written something."""
    before = metrics_file.stat().st_mtime_ns
    with tiny_run.start("rlx.cli", "train", *arguments) as process:
        try:
            # Twice: the first change may be the removal of what is beyond the checkpoint.
            for _ in range(2):
                while metrics_file.stat().st_mtime_ns == before and process.poll() is None:
                    time.sleep(0.001)
                before = metrics_file.stat().st_mtime_ns
            time.sleep(rng.uniform(0, 0.1))
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("phase, count", [("rollout", 30), ("update", 3), ("evaluation", 3)])
def test_a_run_told_to_stop_saves_the_last_whole_update(recipe, undisturbed, phase, count, capsys):
    """SIGTERM in a phase. Nothing else saves here, so the checkpoint is the one that the signal made."""
    name, never = f"stopped-{phase}", {"checkpoint__every": 100}
    run = recipe.parent / "runs" / name
    with interrupting("SIGTERM", phase, count):
        assert train.main(["rlx train", *command(recipe, name, **never)]) == EXIT_PREEMPTED == 75
    assert "Run the same command again to continue" in capsys.readouterr().err
    saved = {int(path.name) for path in (run / "checkpoints").iterdir()}
    recorded = max(record["update"] for record in tiny_run.records(run / "metrics.jsonl"))
    assert saved == {0, recorded}
    assert recorded in (2, 3)
    assert not (run / "summary.json").exists()
    assert_same_run(recipe, run_to_the_end(recipe, name, **never), undisturbed)
    assert f"resumed after update {recorded}; dropped 0 metric" in capsys.readouterr().err


def test_a_run_with_lanes_told_to_stop_ends_in_the_same_bits(recipe):
    lanes = {"engine__lanes": 2}
    whole = run_to_the_end(recipe, "lanes", **lanes)
    with interrupting("SIGTERM", "update", 3):
        assert train.main(["rlx train", *command(recipe, "lanes-stopped", **lanes)]) == EXIT_PREEMPTED
    assert_same_run(recipe, run_to_the_end(recipe, "lanes-stopped", **lanes), whole)


def test_a_run_told_to_stop_before_its_first_update_starts_anew(recipe, undisturbed, capsys):
    run = recipe.parent / "runs" / "early"
    with interrupting("SIGTERM", "rollout", 2):
        assert train.main(["rlx train", *command(recipe, "early")]) == EXIT_PREEMPTED
    assert list((run / "checkpoints").iterdir()) == []
    assert tiny_run.records(run / "metrics.jsonl") == []
    assert_same_run(recipe, run_to_the_end(recipe, "early"), undisturbed)
    assert "resumed" not in capsys.readouterr().err


def test_a_cold_start_that_could_not_be_published_is_not_lost(recipe, undisturbed, monkeypatch):
    def fails(run):
        raise EngineError("the engine did not load it", reason="load")

    arguments = ["rlx train", *command(recipe, "unpublished")]
    with monkeypatch.context() as patch:
        patch.setattr(train, "serve_cold_start", fails)
        with pytest.raises(EngineError, match="did not load"):
            train.main(arguments)
    monkeypatch.delattr(train, "cold_start")  # the run that continues has no use for it
    assert_same_run(recipe, run_to_the_end(recipe, "unpublished"), undisturbed)


def test_a_run_told_to_stop_when_nothing_is_left_to_do_finishes(recipe, undisturbed):
    with interrupting("SIGTERM", "finish", 1):
        assert_same_run(recipe, run_to_the_end(recipe, "late"), undisturbed)


def test_the_process_exits_75(recipe):
    """The same by a signal from outside, to the command as a user starts it."""
    run = recipe.parent / "runs" / "outside"
    with tiny_run.start("rlx.cli", "train", *command(recipe, "outside", learner__updates=1000)) as process:
        while process.poll() is None and not list(run.glob("checkpoints/4")):
            time.sleep(0.01)
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "Run the same command again to continue" in errors
    assert "Traceback" not in errors
    assert max(int(path.name) for path in run.glob("checkpoints/*")) >= 4
