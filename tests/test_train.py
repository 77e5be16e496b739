"""`rlx train` from end to end on a tiny model: what a run leaves behind, and that it learns."""

import asyncio
import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlx import train as training
from rlx.audit_engine import AuditFailed
from rlx.config.parse import parse
from rlx.feed import Synchronous
from rlx.metrics.ledger import Ledger
from rlx.metrics.names import find_metric
from rlx.run import Run
from rlx.train import TrainingStopped, train
from rlx.types import RowShape
from tests import tiny_run

UPDATES = 3
CHANGES = {
    "learner__updates": UPDATES,
    "eval__every": 2,
    "tasks__held_out": 6,
    "lora__targets": ("q_proj", "down_proj"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(recipe):
    """(configuration, summary, directory) of a whole run."""
    config = tiny_run.config(recipe, **CHANGES)
    return config, train(config), recipe.parent / "runs" / "tiny"


@pytest.fixture(scope="module")
def metrics(finished):
    """update -> its metrics."""
    return {r["update"]: r for r in tiny_run.records(finished[2] / "metrics.jsonl") if "policy/loss" in r}


@pytest.fixture(scope="module")
def samples(finished):
    return tiny_run.records(finished[2] / "samples.jsonl")


def test_a_run_leaves_what_the_design_says(finished):
    _, _, directory = finished
    assert {path.name for path in directory.iterdir()} == {
        "adapter",
        "checkpoints",
        "config.json",
        "events",
        "ledger.json",
        "lock",
        "metrics.jsonl",
        "samples.html",
        "samples.jsonl",
        "summary.json",
    }
    kept = {path.name for path in (directory / "checkpoints").iterdir()}
    assert kept == {"2", "3"}, "the two newest"


def test_the_configuration_reads_back(finished):
    config, _, directory = finished
    assert parse(json.loads((directory / "config.json").read_text())) == config


def test_the_summary_says_what_became_better(finished):
    _, summary, directory = finished
    assert json.loads((directory / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["updates"] == summary["version"] == UPDATES
    assert summary["eval/attempts"] == 6 * 2
    assert summary["seconds"] > 0
    rates = [summary[f"eval/pass_rate_{label}"] for label in ("base", "before", "after")]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] == rates[1], "without a cold start the base model is what training starts from"
    assert set(summary["eval/evaluations"]) == {"base", "before", "update 2", "after"}


def test_every_metric_is_in_the_table(finished, metrics):
    named = {name for r in tiny_run.records(finished[2] / "metrics.jsonl") for name in r} - {"update", "label"}
    assert {name for name in named if find_metric(name) is None} == set()
    assert set(metrics) == {1, 2, 3}
    assert all(np.isfinite(value) for record in metrics.values() for value in record.values())
    evaluated = [r["update"] for r in tiny_run.records(finished[2] / "metrics.jsonl") if "eval/pass_rate" in r]
    assert evaluated == [0, 2, 3]


def test_rewards_vary_and_the_metrics_agree_with_the_samples(metrics, samples):
    for update, record in metrics.items():
        trained = [s for s in samples if s["update"] == update and s["phase"] == "train"]
        assert len(trained) == 4 * 8
        rewards = np.array([s["reward"] for s in trained])
        assert 0 < rewards.mean() < 1
        assert record["reward/mean"] == rewards.mean()
        assert record["reward/std"] == pytest.approx(rewards.std())
        assert record["response/length_mean"] == np.mean([len(s["logprobs"]) for s in trained])
        assert record["batch/tokens"] == sum(len(s["logprobs"]) for s in trained)


def test_updates_move_the_policy_and_are_on_policy(metrics):
    for record in metrics.values():
        assert record["optimizer/update_norm"] > 0
        assert record["offpolicy/age_max"] == 0
        assert record["offpolicy/logprob_gap_max"] < 1e-3, "sampler and trainer must mean the same distribution"
    assert metrics[1]["offpolicy/logprob_gap_max"] != metrics[2]["offpolicy/logprob_gap_max"]


def test_samples_hold_what_they_were_trained_on(samples):
    for s in samples:
        written = len(s["tokens"]) - s["prompt_tokens"]
        assert len(s["logprobs"]) == written
        assert all(p <= 0 for p in s["logprobs"])
        assert s["versions"] == [
            [max(s["update"] - 1, 0) if s["phase"] == "train" else s["update"], s["prompt_tokens"], len(s["tokens"])]
        ]
        assert s["grade"]["outcome"] == "graded"
        assert s["stop_reason"] == ("stop" if s["tokens"][-1] in (0, 2) else "length")
    assert {s["stop_reason"] for s in samples} == {"stop", "length"}


def test_no_task_is_in_training_and_evaluation(samples):
    asked = {phase: {s["question"] for s in samples if s["phase"] == phase} for phase in ("train", "eval")}
    assert len(asked["eval"]) == 6
    assert len(asked["train"]) > 6
    assert asked["train"] & asked["eval"] == set()


def test_the_ledger_balances(finished, metrics, samples):
    _, summary, directory = finished
    ledger = Ledger()
    ledger.set_state(json.loads((directory / "ledger.json").read_text()))
    ledger.check()
    assert summary["ledger"] == ledger.get_state()
    tokens = {phase: sum(len(s["logprobs"]) for s in samples if s["phase"] == phase) for phase in ("train", "eval")}
    assert ledger["trained"].tokens == tokens["train"] == sum(r["batch/tokens"] for r in metrics.values())
    assert ledger["evaluated"].tokens == tokens["eval"]
    assert ledger.total.tokens == sum(tokens.values())
    assert (ledger["in_flight"], ledger["buffered"]) == ((0, 0, 0), (0, 0, 0))


def test_tensorboard_shows_the_same_numbers(finished, metrics):
    events = EventAccumulator(str(finished[2] / "events"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    assert set(metrics[1]) - {"update"} <= set(tags["scalars"])
    for name in ("reward/mean", "policy/loss", "optimizer/grad_norm"):
        points = events.Scalars(name)
        assert [p.step for p in points] == [1, 2, 3]
        assert [p.value for p in points] == [np.float32(metrics[p.step][name]) for p in points]
    assert [p.step for p in events.Scalars("eval/pass_rate")] == [0, 2, 3]
    assert "reward/distribution" in tags["histograms"]
    assert {"response/samples", "eval/samples"} <= set(tags["tensors"])


def test_the_adapter_is_peft_s(finished):
    config, summary, directory = finished
    assert summary["policy"] == str(directory / "adapter")
    adapter = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"], adapter["lora_alpha"]) == ("LORA", 4, 8)
    assert adapter["target_modules"] == ["q_proj", "down_proj"]
    assert adapter["base_model_name_or_path"] == config.model.path
    tensors = load_file(directory / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.model.layers.") for name in tensors} == {
        f"{layer}.{module}.lora_{ab}.weight"
        for layer in (0, 1)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for ab in "AB"
    }
    assert all(np.abs(array).max() > 0 for array in tensors.values()), "B starts at zero and must have moved"


def test_a_finished_run_is_left_as_it_is(finished, capsys):
    config, summary, directory = finished
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    other = dataclasses.replace(config, learner=dataclasses.replace(config.learner, learning_rate=3e-3))
    for again in (config, other):
        assert train(again) == json.loads(json.dumps(summary))
        assert f"complete: {UPDATES} updates" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_a_run_that_is_extended_says_which_settings_are_new(finished, tmp_path, capsys):
    copy = tmp_path / "runs"
    shutil.copytree(finished[2].parent, copy)
    recipe = finished[2].parents[1] / "recipe.py"
    more = {"learner__updates": UPDATES + 1, "learner__learning_rate": 3e-3, "run__directory": copy}
    summary = train(tiny_run.config(recipe, **{**CHANGES, **more}))
    assert summary["updates"] == UPDATES + 1
    said = capsys.readouterr().err
    assert f"resumed after update {UPDATES}" in said
    assert "learner.learning_rate: 0.01 -> 0.003" in said


def test_rows_of_one_shape_change_no_number(recipe, monkeypatch):
    """The first update of the same samples."""
    shapes, update = [], training.update

    def seen(step, optimizer, state, frozen, batch):
        shapes.append(batch[0].row_shape)
        return update(step, optimizer, state, frozen, batch)

    monkeypatch.setattr(training, "update", seen)
    shape = {"learner__row_samples": 2, "learner__row_prefix": 80, "learner__row_tokens": 240}
    changes = {"learner__updates": 1, "learner__row_targets": 0, "run__name": "anywhere"}
    found = []
    for more in ({}, {**shape, "run__name": "shaped"}):
        config = tiny_run.config(recipe, **(changes | more))
        train(config)
        records = tiny_run.records(recipe.parent / "runs" / config.run.name / "metrics.jsonl")
        found.append(next(r for r in records if "policy/loss" in r))
    anywhere, shaped = found
    for name in ("policy/loss", "optimizer/grad_norm", "policy/entropy"):
        assert shaped[name] == pytest.approx(anywhere[name], rel=1e-4, abs=1e-6)
    assert shapes == [None, RowShape(80, 2)]


def test_it_runs_in_a_notebook(recipe):
    """Where the main thread has an event loop of its own, which is running."""

    async def cell():
        return train(tiny_run.config(recipe, run__name="notebook", learner__updates=1))

    assert asyncio.run(cell())["updates"] == 1


def test_a_run_without_signal_stops_and_says_why(recipe, tmp_path):
    tasks = tiny_run.digit_tasks(tmp_path / "tasks.jsonl", answers=["123456"])
    changes = {"run__name": "flat", "tasks__sources__digits__path": tasks, "rollout__filter_no_signal": True}
    config = tiny_run.config(recipe, **changes, rollout__no_signal_limit=2, learner__updates=9)
    with pytest.raises(TrainingStopped, match=r"2 collections in a row .*no_signal_limit.*'digits': 0.0") as caught:
        train(config)
    assert "Choose tasks that the model solves sometimes" in str(caught.value)
    ledger = json.loads((recipe.parent / "runs" / "flat" / "ledger.json").read_text())
    assert ledger["bins"]["no_signal"][1:] == [2 * 32, 2 * 4]
    assert "trained" not in ledger["bins"]


def test_updates_that_are_not_finite_stop_the_run(recipe, monkeypatch):
    """The weights of such an update never existed: neither published nor counted."""
    update = training.update

    def poisoned(step, optimizer, state, frozen, batch):
        poisoned = [m.replace(advantages=m.advantages * np.nan) for m in batch]
        return update(step, optimizer, state, frozen, poisoned)

    monkeypatch.setattr(training, "update", poisoned)
    config = tiny_run.config(recipe, run__name="nan", learner__nonfinite_limit=2, learner__updates=9)
    with pytest.raises(TrainingStopped, match=r"2 updates in a row .*nonfinite_limit.* version 0"):
        train(config)
    records = tiny_run.records(recipe.parent / "runs" / "nan" / "metrics.jsonl")
    skipped = [r for r in records if "optimizer/skipped_updates" in r]
    assert [r["optimizer/skipped_updates"] for r in skipped] == [1, 2]
    assert skipped[-1]["ledger/samples_failed_nonfinite_update"] == 2 * 32
    assert skipped[-1]["ledger/samples_trained"] == 0


@pytest.mark.parametrize(
    "owner, attribute, error",
    [(Synchronous, "publish", OSError("no space left")), (Run, "audit", AuditFailed("another version"))],
)
def test_an_update_is_not_lost_where_it_cannot_be_published(recipe, monkeypatch, owner, attribute, error):
    """Nor where it is published and an engine serves something else. The run ends, and the next one goes on with it."""
    calls, name, call = itertools.count(1), f"unpublished_{attribute}", getattr(owner, attribute)
    config = tiny_run.config(recipe, run__name=name, learner__updates=3, checkpoint__every=9)

    def failing(*arguments):
        if next(calls) == 2:
            raise error
        return call(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, failing)
        with pytest.raises(type(error)):
            train(config)
    _, restored = tiny_run.newest_checkpoint(config)
    assert (restored.step, int(restored.state.version)) == (2, 2)
    assert train(config)["version"] == 3
    records = tiny_run.records(recipe.parent / "runs" / name / "metrics.jsonl")
    assert [r["update"] for r in records if "policy/loss" in r] == [1, 2, 3]


@pytest.mark.slow
def test_training_learns(recipe, tmp_path):
    """The model likes two digits; that only one of them is ever right must make it prefer that one."""
    tasks = tiny_run.digit_tasks(tmp_path / "tasks.jsonl", answers="7")
    changes = {"run__name": "learns", "tasks__sources__digits__path": tasks, "learner__updates": 40}
    summary = train(tiny_run.config(recipe, **changes, checkpoint__every=40, eval__attempts_per_task=8))
    assert summary["eval/pass_rate_after"] > summary["eval/pass_rate_before"] + 0.3
    low, high = summary["eval/interval_after"][0], summary["eval/interval_before"][1]
    assert low > high, "the intervals must not overlap"
