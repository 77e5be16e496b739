"""Evaluation: the numbers, and `rlx evaluate` on a run, beside a run, and on a model alone."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from rlx import evaluate
from rlx.checkpoint import Checkpoints
from rlx.config.errors import ConfigError
from rlx.config.schema import EvalConfig
from rlx.evaluation import summarise
from rlx.metrics.names import check_names
from rlx.train import train
from rlx.types import Group, Sample, StopReason, Task, VersionSpan
from tests import tiny_run
from tests.waiting import gone


def group(source: str, *rewards: float, length: int = 3) -> Group:
    task = Task(f"{source}/0", source, "question", "answer", "exact")
    sample = {
        "grade": {"outcome": "graded"},
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
    config = EvalConfig(every=0, attempts_per_task=2, watch_nth=1, temperature=1.0, k=(1, 2), confidence=0.95)
    groups = [group("a", 1.0, 0.0), group("a", 0.0, 0.5, length=5), group("b", 1.0, 1.0)]
    result = summarise(groups, config)
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
    measured = json.loads(json.dumps(summary["eval/evaluations"]["base"]))
    assert json.loads(line) == {**measured, "version": None}
    assert "nobody: the model itself: pass rate" in first
    assert first.partition("itself: ")[2].startswith(f"pass rate {summary['eval/pass_rate_base']:.3f} [")
    assert not (recipe.parent / "runs" / "nobody").exists()


def test_more_attempts_narrow_the_interval(recipe, summary):
    _, wide = evaluate.evaluate_run(tiny_run.config(recipe))
    _, narrow = evaluate.evaluate_run(tiny_run.config(recipe, eval__attempts_per_task=8, eval__k="(1, 2, 8)"))
    assert narrow.attempts == 4 * wide.attempts
    assert narrow.pass_rate_high - narrow.pass_rate_low < wide.pass_rate_high - wide.pass_rate_low
    rates = [narrow.pass_at_k[k] for k in ("1", "2", "8")]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(narrow.pass_rate)


def test_a_grading_that_failed_is_no_attempt():
    config = EvalConfig(every=0, attempts_per_task=2, watch_nth=1, temperature=1.0, k=(1, 2), confidence=0.95)
    whole, broken = group("a", 1.0, 0.0), group("a", 1.0, 0.0)
    failed = dataclasses.replace(broken.samples[1], grade={"outcome": "timeout"})
    result = summarise([whole, dataclasses.replace(broken, samples=(broken.samples[0], failed))], config)
    assert (result.attempts, result.failed_gradings, result.pass_rate) == (3, 1, pytest.approx(2 / 3))
    assert result.pass_at_k == {"1": 0.75, "2": 1.0}
    with pytest.raises(ValueError, match="all 1 gradings of the evaluation failed"):
        summarise([dataclasses.replace(broken, samples=(failed,))], config)


def test_greedy_evaluation(recipe, summary):
    greedy = {"eval__temperature": 0.0, "eval__attempts_per_task": 1, "eval__k": "(1,)"}
    results = [evaluate.evaluate_run(tiny_run.config(recipe, **greedy)) for _ in range(2)]
    assert results[0] == results[1]


def test_evaluating_a_run_that_is_training_leaves_its_files_alone(recipe, summary):
    """A save in progress is a directory of a name that the trainer, but nobody else, may clean up."""
    run = recipe.parent / "runs" / "busy"
    shutil.copytree(recipe.parent / "runs" / "tiny", run)
    saving = run / "checkpoints" / "3.orbax-checkpoint-tmp"
    saving.mkdir()
    evaluate.evaluate_run(tiny_run.config(recipe, run__name="busy"))
    assert saving.is_dir()
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    assert gone(saving)
    checkpoints.close()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"lora__rank": 8}, r"config.lora.rank = 8: .* was made with 4"),
        ({"lora__alpha": 1.0}, r"config.lora.alpha = 1.0: .* was made with"),
        ({"tasks__held_out": 3}, r"config.tasks.held_out = 3: .* was made with"),
    ],
)
def test_a_run_is_evaluated_as_what_it_is(recipe, summary, change, words):
    """Another scale is another policy; other held-out tasks may have been trained on."""
    with pytest.raises(ConfigError, match=words):
        evaluate.evaluate_run(tiny_run.config(recipe, **change))
