"""`rlx sft`, and the cold start inside `rlx train`."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx import assemble, sft
from rlx.config.errors import ConfigError
from rlx.data.packing import pack
from rlx.evaluate import evaluate_run
from rlx.interrupt import EXIT_PREEMPTED
from rlx.metrics.view import read_run
from rlx.models import hf
from rlx.models.transformer import forward, logits
from rlx.supervised import Hooks, Progress, fresh, prepare, supervise
from rlx.train import train
from tests import tiny_run

STEPS = 20


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Examples answer 7 to everything, as the tasks do."""
    directory = tmp_path_factory.mktemp("sft")
    recipe = tiny_run.write(directory)
    tiny_run.digit_tasks(directory / "tasks.jsonl", answers="7")
    examples = [{"question": f"Digit {i}?", "response": "7"} for i in range(100, 110)]
    tiny_run.write_jsonl(directory / "sft.jsonl", examples)
    return recipe


def changes(recipe, **more):
    sft = {"steps": STEPS, "path": recipe.parent / "sft.jsonl", "batch_size": 4, "learning_rate": 1e-2}
    return {f"sft__{key}": value for key, value in sft.items()} | {"lora__rank": 0, **more}


@pytest.fixture(scope="module")
def tuned(recipe):
    """The directory that `rlx sft` made."""
    assert sft.main(["rlx sft", *tiny_run.arguments(recipe, **changes(recipe, run__name="tuned"))]) == 0
    return recipe.parent / "runs" / "tuned" / "sft"


def negative_log_likelihood(config, question: str, response: str) -> float:
    """Mean over the response and its end of turn, from the dense logits."""
    model = assemble.load_model(config)
    tokens, mask = model.tokenizer.encode_example(question, response)
    hidden = forward(
        model.arch,
        model.params,
        jnp.array(tokens)[None],
        jnp.arange(len(tokens))[None],
        jnp.ones((1, len(tokens)), int),
    )
    z = np.asarray(logits(model.params, hidden), np.float64)[0]
    p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return float(-np.mean([p[t - 1, tokens[t]] for t in np.flatnonzero(mask)]))


def test_the_tuned_model_is_a_better_checkpoint(recipe, tuned):
    asked = ("Digit 5?", "7")
    before = negative_log_likelihood(tiny_run.config(recipe), *asked)
    after = negative_log_likelihood(tiny_run.config(recipe, model__path=tuned), *asked)
    assert after < before / 2


def test_it_passes_more_often(recipe, tuned):
    before, after = (
        evaluate_run(tiny_run.config(recipe, model__path=path))[1] for path in (recipe.parent / "model", tuned)
    )
    assert after.pass_rate > before.pass_rate + 0.3


def test_it_is_not_made_twice(recipe, tuned, capsys):
    assert sft.main(["rlx sft", *tiny_run.arguments(recipe, **changes(recipe, run__name="tuned"))]) == 2
    assert f"{tuned} exists; choose another --config.run.name" in capsys.readouterr().err


def test_rows_of_examples_have_no_shape(recipe):
    shape = {"learner__row_samples": 2, "learner__row_prefix": 80, "learner__row_tokens": 240}
    config = tiny_run.config(recipe, **changes(recipe, sft__steps=1, **shape))
    model = assemble.load_model(config)
    assert config.learner.row_shape is not None
    assert prepare(config, model, sft.sft_examples(config, model)).packing.row_shape is None


def test_no_steps_are_refused(recipe, capsys):
    assert sft.main(["rlx sft", *tiny_run.arguments(recipe)]) == 2
    assert "config.sft.steps = 0: nothing to do; give --config.sft.steps=50" in capsys.readouterr().err


def supervised(config):
    """(reports by step, examples) of the steps that `config` asks for."""
    model = assemble.load_model(config)
    examples = sft.sft_examples(config, model)
    reports = {}
    hooks = Hooks(reports.__setitem__, lambda step, state: None, lambda state, progress: None)
    start = fresh(config, model, examples, tiny_run.fresh_state(config, model))
    supervise(config, model, examples, start, Progress(), hooks)
    return reports, examples


@pytest.mark.parametrize("batch, fill", [({"batch_size": 10}, 0.5), ({"batch_rows": 2}, 0.9)], ids=["examples", "rows"])
def test_the_loss_is_the_mean_negative_log_likelihood(recipe, batch, fill):
    """However the ten examples are packed; five share a row of 160 tokens."""
    settings = {f"sft__{key}": value for key, value in batch.items()}
    config = tiny_run.config(recipe, **changes(recipe, sft__steps=1, learner__micro_batch_rows=1, **settings))
    reports, _ = supervised(config)
    expected = np.mean([negative_log_likelihood(config, f"Digit {i}?", "7") for i in range(100, 110)])
    assert reports[1]["sft/loss"] == pytest.approx(expected, rel=1e-4)
    assert reports[1]["sft/packing_fraction"] > fill


def test_the_validation_loss_is_that_of_examples_that_are_not_trained_on(recipe):
    config = tiny_run.config(recipe, **changes(recipe, sft__steps=4, sft__eval_every=2, sft__validation_fraction=0.3))
    reports, examples = supervised(config)
    assert (len(examples.training), len(examples.validation)) == (7, 3)
    model = assemble.load_model(config)
    asked = [model.tokenizer.decode(e.tokens[~e.mask]) for e in examples.validation]
    apart = [i for i in range(100, 110) if any(f"Digit {i}?" in prompt for prompt in asked)]
    expected = np.mean([negative_log_likelihood(config, f"Digit {i}?", "7") for i in apart])
    assert reports[0]["sft/validation_loss"] == pytest.approx(expected, rel=1e-4), "before the first step"
    assert reports[0]["sft/validation_perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)
    assert [step for step, values in reports.items() if "sft/validation_loss" in values] == [0, 2, 4]
    assert reports[4]["sft/validation_loss"] < expected
    assert "sft/tokens_per_second" not in reports[1], "it holds compilation"
    assert reports[2]["sft/tokens_per_second"] > 0
    assert reports[4]["sft/epochs"] == pytest.approx(4 * 4 / 7)


def test_a_file_of_its_own_for_validation(recipe):
    path = recipe.parent / "validation.jsonl"
    tiny_run.write_jsonl(path, [{"question": "Digit 5?", "response": "7"}])
    config = tiny_run.config(recipe, **changes(recipe, sft__steps=1, sft__validation_path=path))
    reports, examples = supervised(config)
    assert (len(examples.training), len(examples.validation)) == (10, 1)
    assert reports[0]["sft/validation_loss"] == pytest.approx(
        negative_log_likelihood(config, "Digit 5?", "7"), rel=1e-4
    )


def test_the_steps_are_compiled_for_what_the_rows_may_hold(recipe):
    config = tiny_run.config(recipe, **changes(recipe, sft__batch_rows=4))
    model = assemble.load_model(config)
    examples = sft.sft_examples(config, model)
    job = prepare(config, model, examples)
    assert job.packing.capacity * job.packing.rows == 4
    assert job.step.num_sequences == 4 * (160 // min(len(e.tokens) for e in examples.training))


def test_examples_are_masked_to_the_response(recipe):
    config = tiny_run.config(recipe, **changes(recipe))
    model = assemble.load_model(config)
    examples = sft.sft_examples(config, model).training
    for example in examples:
        written = example.tokens[example.mask]
        assert model.tokenizer.decode(written) == "7"
        assert written[-1] == model.tokenizer.end_of_turn_id
    packed = pack(examples, assemble.packing_config(config, 10, 0))
    assert packed.mask.sum() == 10 * 2


def worse(recipe):
    """Validation examples that say the opposite: every step makes their loss larger after the first few."""
    path = recipe.parent / "opposite.jsonl"
    tiny_run.write_jsonl(path, [{"question": f"Digit {i}?", "response": "3"} for i in range(100, 110)])
    return changes(recipe, sft__validation_path=path, sft__eval_every=2, sft__steps=10, sft__batch_size=10)


def test_the_model_of_the_lowest_validation_loss_is_exported(recipe, capsys):
    config = tiny_run.config(recipe, run__name="best", **worse(recipe))
    summary = sft.tune(config)
    view = read_run(config.run.path / "supervised")
    losses = {r["step"]: r["sft/validation_loss"] for r in view.supervised if r["step"] and "sft/validation_loss" in r}
    best = min(losses, key=losses.get)
    assert summary["exported_step"] == best < 10
    assert summary["validation_loss"] == losses[best]
    assert view.state == "complete"
    exported = tiny_run.config(recipe, model__path=config.run.path / "sft")
    loss = np.mean([negative_log_likelihood(exported, f"Digit {i}?", "3") for i in range(100, 110)])
    assert loss == pytest.approx(losses[best], rel=1e-3)
    assert f"step {best}/10" in capsys.readouterr().err
    assert f"of step {best}: its validation loss is the lowest, {losses[best]:.4f}" in sft.describe(summary)
    assert "the examples have not made it better" in sft.describe(summary)


def test_an_interrupted_run_ends_in_the_same_bits(recipe, monkeypatch, capsys):
    whole = tiny_run.config(recipe, run__name="whole", **changes(recipe, sft__validation_fraction=0.3))
    sft.tune(whole)
    report = sft.SupervisedRecorder.report

    def stop_at_seven(self, step, scalars):
        report(self, step, scalars)
        if step == 7:
            signal.raise_signal(signal.SIGTERM)

    words = ["rlx sft", *tiny_run.arguments(recipe, run__name="cut", **changes(recipe, sft__validation_fraction=0.3))]
    with monkeypatch.context() as patch:
        patch.setattr(sft.SupervisedRecorder, "report", stop_at_seven)
        assert sft.main(words) == EXIT_PREEMPTED
    assert "Run the same command again" in capsys.readouterr().err
    assert sft.main(words) == 0
    assert "continues after step 7" in capsys.readouterr().err
    cut = tiny_run.config(recipe, run__name="cut")
    arch = hf.read_architecture(str(whole.run.path / "sft"))
    first, second = (hf.load_params(str(c.run.path / "sft"), arch, "float32") for c in (whole, cut))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    timed = "sft/tokens_per_second"
    rows = [
        [{k: v for k, v in r.items() if k != timed} for r in read_run(c.run.path / "supervised").supervised]
        for c in (whole, cut)
    ]
    assert rows[0] == rows[1]


def test_it_does_not_continue_as_something_else(recipe, monkeypatch):
    begun = changes(recipe, run__name="begun", sft__steps=2)
    monkeypatch.setattr(sft, "_export", lambda *_: {})
    sft.tune(tiny_run.config(recipe, **begun))
    with pytest.raises(ConfigError, match=r"config.sft.learning_rate = 0.1: .* was made with 0.01"):
        sft.tune(tiny_run.config(recipe, **begun | {"sft__learning_rate": 0.1}))
    other = recipe.parent / "other.jsonl"
    tiny_run.write_jsonl(other, [{"question": f"Digit {i}?", "response": "7"} for i in range(100, 109)])
    with pytest.raises(ConfigError, match=r"config.sft.path: .* was begun with other files"):
        sft.tune(tiny_run.config(recipe, **begun | {"sft__path": other}))
    with pytest.raises(ConfigError, match=r"config.sft.steps = 1: .* is at step 2 already"):
        sft.tune(tiny_run.config(recipe, **begun | {"sft__steps": 1}))


def test_a_cold_start_keeps_the_lowest_validation_loss(recipe):
    config = tiny_run.config(recipe, **worse(recipe) | {"run__name": "cold_best", "learner__updates": 1})
    train(config)
    records = [r for r in tiny_run.records(config.run.path / "metrics.jsonl") if "sft/validation_loss" in r]
    losses = {r["step"]: r["sft/validation_loss"] for r in records if r["step"]}
    _, restored = tiny_run.newest_checkpoint(config)
    assert min(losses, key=losses.get) < 10
    assert int(restored.state.version) == 1


def test_training_starts_from_the_cold_start(recipe):
    config = tiny_run.config(recipe, **changes(recipe, run__name="cold", learner__updates=1))
    summary = train(config)
    assert summary["eval/pass_rate_before"] > summary["eval/pass_rate_base"] + 0.3
    assert summary["version"] == 1, "supervised steps are no policy versions"
    records = [r for r in tiny_run.records(recipe.parent / "runs" / "cold" / "metrics.jsonl") if "sft/loss" in r]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert {r["update"] for r in records} == {0}
    assert records[-1]["sft/loss"] < records[0]["sft/loss"] / 2
    evaluations = json.loads((recipe.parent / "runs" / "cold" / "summary.json").read_text())["eval/evaluations"]
    assert [e["version"] for e in evaluations.values()] == [0, 0, 1]
