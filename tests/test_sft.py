"""`rlx sft`, and the cold start inside `rlx train`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from rlx import assemble, sft
from rlx.data.packing import pack
from rlx.evaluate import evaluate_run
from rlx.models.transformer import forward, logits
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


def test_no_steps_are_refused(recipe, capsys):
    assert sft.main(["rlx sft", *tiny_run.arguments(recipe)]) == 2
    assert "config.sft.steps = 0: nothing to do; give --config.sft.steps=50" in capsys.readouterr().err


def test_the_loss_is_the_mean_negative_log_likelihood(recipe):
    config = tiny_run.config(recipe, **changes(recipe, sft__steps=1, sft__batch_size=10))
    model = assemble.load_model(config)
    examples = sft.sft_examples(config, model)
    reported = {}
    state = tiny_run.fresh_state(config, model)
    sft.supervise(config, model, examples, state, lambda step, scalars: reported.update(scalars), lambda: None)
    expected = np.mean([negative_log_likelihood(config, f"Digit {i}?", "7") for i in range(100, 110)])
    assert reported["sft/loss"] == pytest.approx(expected, rel=1e-4)


def test_examples_are_masked_to_the_response(recipe):
    config = tiny_run.config(recipe, **changes(recipe))
    model = assemble.load_model(config)
    for example in sft.sft_examples(config, model):
        written = example.tokens[example.mask]
        assert model.tokenizer.decode(written) == "7"
        assert written[-1] == model.tokenizer.end_of_turn_id
    packed = pack(sft.sft_examples(config, model), assemble.packing_config(config, 10, 0))
    assert packed.mask.sum() == 10 * 2


def test_batches_go_through_every_example_before_one_comes_again():
    batches = sft._batches(10, 3, seed=0)
    epochs = [np.concatenate([next(batches) for _ in range(3)]) for _ in range(4)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


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
