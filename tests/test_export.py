"""What leaves a run as files is the policy that was trained: `rlx export` and the directory `rlx train` ends with."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx import assemble, cli, export
from rlx.models import hf, peft
from rlx.models.lora import adapter_scale
from rlx.models.transformer import forward, logits
from rlx.train import train
from tests import tiny_run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("export"))


def run(recipe, **more) -> tuple:
    """(configuration, directory) of a whole run."""
    config = tiny_run.config(recipe, learner__updates=2, **more)
    train(config)
    return config, recipe.parent / "runs" / config.run.name


@pytest.fixture(scope="module")
def adapted(recipe):
    return run(recipe, run__name="adapted", learner__learning_rate=0.1)


@pytest.fixture(scope="module")
def whole(recipe):
    """Every parameter is trained, kept in float32, served in bfloat16."""
    return run(recipe, run__name="whole", lora__rank=0, model__dtype="bfloat16")


def dense_logits(arch, params, adapter=None, scale=1.0) -> np.ndarray:
    tokens = jnp.arange(60).reshape(2, 30)
    positions = jnp.broadcast_to(jnp.arange(30), (2, 30))
    hidden = forward(arch, params, tokens, positions, jnp.ones_like(tokens), adapter=adapter, adapter_scale=scale)
    return np.asarray(logits(params, hidden))


def trained(config):
    """(model, trainable parameters) of the run's newest checkpoint."""
    model, restored = tiny_run.newest_checkpoint(config)
    assert int(restored.state.version) == restored.step == config.learner.updates
    return model, restored.state.trainable


def exported(config, to) -> assemble.Model:
    """The exported directory, loaded as any model is."""
    words = [f"--config={config.run.directory}/../recipe.py", f"--config.run.name={config.run.name}"]
    words += [f"--config.lora.rank={config.lora.rank}", f"--config.model.dtype={config.model.dtype}", f"--to={to}"]
    assert export.main(["rlx export", *words]) == 0
    return assemble.load_model(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(to))))


def test_the_merged_directory_is_the_trained_policy(adapted, tmp_path, capsys):
    config, _ = adapted
    model, adapter = trained(config)
    merged = exported(config, tmp_path / "merged")
    found = dense_logits(merged.arch, merged.params)
    expected = dense_logits(model.arch, model.params, adapter, adapter_scale(config.lora))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - dense_logits(model.arch, model.params)).max() > 0.1, "and not the base model"
    assert "version 2 of adapted is in" in capsys.readouterr().out


def test_the_exported_directory_has_the_tokenizer(adapted, tmp_path):
    merged = exported(adapted[0], tmp_path / "merged")
    base = assemble.load_model(adapted[0])
    assert merged.tokenizer.encode_prompt("Digit 3?").tolist() == base.tokenizer.encode_prompt("Digit 3?").tolist()
    assert merged.tokenizer.stop_token_ids == base.tokenizer.stop_token_ids


def test_the_adapter_directory_is_the_trained_policy(adapted):
    config, directory = adapted
    model, adapter = trained(config)
    loaded, lora = peft.load_adapter(directory / "adapter", model.arch)
    assert lora == config.lora
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)


def test_a_model_trained_whole_is_written_whole(whole, tmp_path):
    config, directory = whole
    model, trainable = trained(config)
    served = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), trainable)
    assert json.loads((directory / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    for written in (
        hf.load_params(directory / "model", model.arch, "bfloat16"),
        exported(config, tmp_path / "m").params,
    ):
        jax.tree.map(np.testing.assert_array_equal, written, served)
    assert not np.array_equal(served["embed"], np.asarray(model.params["embed"]))


@pytest.mark.parametrize(
    "words, status, said",
    [
        ([], 2, "--to='' must name a directory that does not exist yet"),
        (["--to=."], 2, "--to='.' must name"),
        (["--to=new", "--config.run.name=nobody"], 1, "runs/nobody has no checkpoint; train first"),
        (["--to=new", "--config.lora.rank=2"], 2, "config.lora.rank = 2: "),
    ],
)
def test_what_cannot_be_exported(recipe, adapted, tmp_path, monkeypatch, capsys, words, status, said):
    monkeypatch.chdir(tmp_path)
    assert cli.run("export", [f"--config={recipe}", "--config.run.name=adapted", *words]) == status
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_saved_nothing_is_named(recipe, tmp_path, capsys):
    (recipe.parent / "runs" / "empty" / "checkpoints").mkdir(parents=True)
    words = [f"--config={recipe}", "--config.run.name=empty", f"--to={tmp_path / 'new'}"]
    assert export.main(["rlx export", *words]) == 1
    assert "runs/empty has no checkpoint; train first" in capsys.readouterr().err
