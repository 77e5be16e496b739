"""`rlx train` on a mesh of virtual devices ends where it ends on one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx import train
from rlx.config.errors import ConfigError
from tests import tiny_run

# Adam divides gradients by their size: with its eps far below them rounding would move whole weights.
CHANGES = {"metrics__samples_every": 2, "metrics__tensorboard": False, "learner__eps": 1e-3}
PARAMETERS, METRICS = 1e-4, 1e-3  # of their size; float32, sums in another order
# log-probs of sampler and trainer are next to the same here: what they differ by is rounding itself
ROUNDING = ("offpolicy/", "centering/")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_run.write(tmp_path_factory.mktemp("mesh"))


def trained(recipe: Path, name: str, layout: str, **changes) -> Path:
    words = {"run__name": name, "cluster__trainer_layout": layout, **CHANGES, **changes}
    train.train(tiny_run.config(recipe, **words))
    return recipe.parent / "runs" / name


@pytest.fixture(scope="module")
def single(recipe):
    return trained(recipe, "single", "")


def assert_same(run: Path, other: Path, parameters: float, metrics: float) -> None:
    found, wanted = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (run, other))
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert np.linalg.norm(found[name] - x) <= parameters * np.linalg.norm(x), name
    mine, theirs = (tiny_run.records(path / "metrics.jsonl") for path in (run, other))
    assert len(mine) == len(theirs)
    for record, against in zip(mine, theirs, strict=True):
        for name in against:
            if name.split("/")[0] in ("policy", "optimizer", "reward", "eval", "batch"):
                assert record[name] == pytest.approx(against[name], rel=metrics, abs=1e-6), name
        for name in (n for n in against if n.startswith(ROUNDING)):
            assert record[name] == pytest.approx(against[name], abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DP2", "TP2 PP2 CP2"])
def test_a_mesh_trains_what_one_device_does(recipe, single, layout):
    run = trained(recipe, layout.replace(" ", ""), layout)
    assert_same(run, single, PARAMETERS, METRICS)
    assert [r["batch/bubble"] for r in tiny_run.records(run / "metrics.jsonl") if "batch/bubble" in r] == (
        [] if layout == "DP2" else [1 / 3] * 3
    )
    written, wanted = (tiny_run.samples(path) for path in (run, single))
    scored = [r["trainer_logprobs"] for r in written if "trainer_logprobs" in r]
    expected = [r["trainer_logprobs"] for r in wanted if "trainer_logprobs" in r]
    assert len(scored) == len(expected) > 0
    np.testing.assert_allclose(np.concatenate(scored), np.concatenate(expected), atol=1e-3)


@pytest.mark.slow
def test_every_parameter_and_a_cold_start_on_a_mesh(recipe):
    """Trained whole, cut over dp; what is written and what a checkpoint gives on one device is the same model."""
    examples = [{"question": f"Digit {i}?", "response": str(i % 10)} for i in range(40, 60)]
    path = tiny_run.write_jsonl(recipe.parent / "sft.jsonl", examples)
    changes = {"lora__rank": 0, "learner__updates": 1, "learner__learning_rate": 1e-3, "sft__path": path}
    changes |= {"sft__steps": 2, "sft__batch_size": 4}
    runs = [trained(recipe, f"whole{i}", layout, **changes) for i, layout in enumerate(("", "TP2 DP2"))]
    one, mesh = (load_file(run / "model" / "model.safetensors") for run in runs)
    for name, x in one.items():
        np.testing.assert_allclose(mesh[name], x, rtol=1e-3, atol=1e-4, err_msg=name)
    _, restored = tiny_run.newest_checkpoint(tiny_run.config(recipe, run__name="whole1", **CHANGES, **changes))
    assert np.abs(np.asarray(restored.state.trainable["embed"]) - mesh["model.embed_tokens.weight"]).max() == 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cluster__trainer_layout": "TP3"}, r"'TP3': TP3 .* does not divide attention heads, 4; no layout of 3"),
        ({"cluster__trainer_layout": "DP4"}, r"DP4 does not divide the 2 rows of a micro-batch; .* TP1 PP2 CP1 DP2"),
        ({"cluster__trainer_layout": "QP4"}, r"trainer_layout = 'QP4': .*'QP4' is none of TPn"),
        (
            {"cluster__trainer_layout": "DP2", "cluster__context_parallel": "ring"},
            r"'DP2': .*context_parallel = 'ring' with CP1, .* set it to 'gather'; .* work: .*CP2",
        ),
        ({"cluster__context_parallel": "ring"}, r"layout = '': .*context_parallel = 'ring' with CP1, .* to 'gather'"),
        ({"cluster__pipeline_rounds": 2}, r"layout = '': .*pipeline_rounds = 2 without a pipeline, PP1: set it to 1"),
        (
            {"cluster__trainer_layout": "PP2", "cluster__pipeline_rounds": 2},
            r"pipeline_rounds = 2 makes 4 blocks of 2 repeats of the layer pattern for PP2, 2 .* set it to 1",
        ),
        ({"cluster__trainer_layout": "TP4 PP2 CP4 DP1"}, "needs 32 devices and .* JAX_NUM_CPU_DEVICES=32"),
        ({"cluster__trainer_nodes": 2}, r"trainer_nodes = 2: config.cluster.trainer_layout must say"),
        ({"cluster__engines": 4}, r"engines = 4\), which this program does not start; .*inference.addresses"),
    ],
)
def test_misfits_are_refused_at_the_start(recipe, changes, message):
    with pytest.raises(ConfigError, match=message):
        train.train(tiny_run.config(recipe, run__name="refused", **changes))
    assert not tiny_run.config(recipe, run__name="refused").run.path.exists(), "nothing was begun"
