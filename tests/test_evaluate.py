"""Evaluation: the numbers, and `rlx evaluate` on a run, beside a run, and on a model alone."""

import json
import shutil

import numpy as np
import pytest

from rlx import evaluate
from rlx.checkpoint import CheckpointError, Checkpoints
from rlx.config.schema import EvalConfig
from rlx.metrics.names import check_names
from rlx.train import train
from rlx.types import Group, Sample, StopReason, Task, VersionSpan
from tests import tiny_run


def group(source: str, *rewards: float, length: int = 3) -> Group:
    task = Task(f"{source}/0", source, "question", "answer", "exact")
    sample = {
        "head": None,
        "stop_reason": StopReason.STOP,
        "text": "",
        "version_spans": (VersionSpan(0, 1, 1 + length),),
    }
    tokens, mask = np.zeros(1 + length, np.int32), np.arange(1 + length) > 0
    return Group(
        task,
        tuple(
            Sample(task, 0, i, tokens, mask, np.zeros(1 + length, np.float32), reward=reward, **sample)
            for i, reward in enumerate(rewards)
        ),
    )


def test_pass_rates_count_attempts_and_pass_at_k_counts_tasks():
    config = EvalConfig(every=0, attempts_per_task=2, temperature=1.0, k=(1, 2), confidence=0.95)
    groups = [group("a", 1.0, 0.0), group("a", 0.0, 0.5, length=5), group("b", 1.0, 1.0)]
    result = evaluate.summarise(groups, config)
    assert (result.pass_rate, result.attempts, result.tasks, result.tokens) == (0.5, 6, 3, 22)
    assert result.pass_at_k == {"1": 0.5, "2": pytest.approx(2 / 3)}
    assert result.by_source == {"a": 0.25, "b": 1.0}
    assert result.reward_mean == pytest.approx(3.5 / 6)
    # Wilson's interval of 3 in 6, from its definition: the p at which |3/6 - p| is 1.96 standard errors.
    for p in (result.pass_rate_low, result.pass_rate_high):
        assert abs(0.5 - p) == pytest.approx(1.959964 * np.sqrt(p * (1 - p) / 6), rel=1e-5)
    check_names(result.scalars())
    assert result.scalars()["eval/pass_rate_a"] == 0.25


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def summary(recipe):
    return train(tiny_run.config(recipe, learner__updates=2, learner__learning_rate=0.1))


def test_a_run_s_checkpoint_gives_what_the_run_measured(recipe, summary, capsys):
    """The same held-out tasks, the same seeds, the weights out of the checkpoint: the same samples."""
    assert evaluate.main(["rlx evaluate", *tiny_run.arguments(recipe)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == json.loads(json.dumps(summary["eval/evaluations"]["after"]))
    assert line["version"] == 2


def test_without_a_run_the_model_itself_is_measured(recipe, summary, capsys):
    assert evaluate.main(["rlx evaluate", *tiny_run.arguments(recipe, run__name="nobody")]) == 0
    first, line = capsys.readouterr().out.splitlines()[-2:]
    assert json.loads(line) == json.loads(json.dumps(summary["eval/evaluations"]["base"]))
    assert first.startswith(f"version 0: pass rate {summary['eval/pass_rate_base']:.3f} [")
    assert not (recipe.parent / "runs" / "nobody").exists()


def test_more_attempts_narrow_the_interval(recipe, summary):
    _, wide = evaluate.evaluate_run(tiny_run.config(recipe))
    _, narrow = evaluate.evaluate_run(tiny_run.config(recipe, eval__attempts_per_task=8, eval__k="(1, 2, 8)"))
    assert narrow.attempts == 4 * wide.attempts
    assert narrow.pass_rate_high - narrow.pass_rate_low < wide.pass_rate_high - wide.pass_rate_low
    rates = [narrow.pass_at_k[k] for k in ("1", "2", "8")]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(narrow.pass_rate)


def test_greedy_evaluation_gives_one_answer(recipe, summary):
    _, result = evaluate.evaluate_run(tiny_run.config(recipe, eval__temperature=0.0))
    assert result.pass_at_k["1"] == result.pass_at_k["2"], "both attempts of a task are the same"


def test_evaluating_a_run_that_is_training_leaves_its_files_alone(recipe, summary):
    """A save in progress is a directory of a name that the trainer, but nobody else, may clean up."""
    run = recipe.parent / "runs" / "busy"
    shutil.copytree(recipe.parent / "runs" / "tiny", run)
    saving = run / "checkpoints" / "3.orbax-checkpoint-tmp"
    saving.mkdir()
    evaluate.evaluate_run(tiny_run.config(recipe, run__name="busy"))
    assert saving.is_dir()
    Checkpoints(run / "checkpoints", keep=2).close()
    assert not saving.exists()


def test_a_checkpoint_of_another_shape_is_refused(recipe, summary):
    with pytest.raises(CheckpointError, match=r"saved float32\[2, 32, 4\], this run has float32\[2, 32, 8\]"):
        evaluate.evaluate_run(tiny_run.config(recipe, lora__rank=8))
