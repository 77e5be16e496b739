"""`rlx audit --samples`: planted causes are named, a clean run is called clean."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlx import audit
from rlx.models.hf import save_params
from rlx.train import train
from tests import planted, tiny_model, tiny_run, tiny_tokenizer

OWN, OLD = planted.policy(version=1), planted.nearby()


@pytest.fixture(scope="module")
def drawn():
    return planted.draw(OWN)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(the policy, an older version), as Hugging Face directories."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, policy in (("own", OWN), ("old", OLD)):
        save_params(folder / name, tiny_model.ARCH, policy.params, "float32")
        tiny_tokenizer.build(folder / name)
    return folder / "own", folder / "old"


def noisy(recorded: np.ndarray) -> np.ndarray:
    return recorded - np.random.default_rng(0).exponential(0.3, recorded.shape).astype(np.float32)


PLANTS = {
    "clean": lambda t, r: (t, r),
    "shift by one": lambda t, r: (t, np.roll(r, 1, -1)),
    "stale version": lambda t, r: planted.draw(OLD),
    "temperature": lambda t, r: planted.draw(OWN, temperature=0.8),
    "truncated sampling": lambda t, r: planted.draw(OWN, keep=planted.top_p(0.9), renormalise=True),
    "dtype": lambda t, r: (t, planted.recomputed(OWN.cast("bfloat16"), t)),
    "head": lambda t, r: (t, planted.recomputed(OWN, t, head_mode="bfloat16")),
    "template": lambda t, r: (t, planted.recomputed(OWN, t, first=1)),
    "unknown": lambda t, r: (t, noisy(r)),
}
MORE = {
    "shift, the other way": ("shift by one", lambda t, r: (t, np.roll(r, -1, -1))),
    "top-k, renormalised": (
        "truncated sampling",
        lambda t, r: planted.draw(OWN, keep=planted.top_k(20), renormalise=True),
    ),
    "top-k, full softmax recorded": ("truncated sampling", lambda t, r: planted.draw(OWN, keep=planted.top_k(20))),
    "top-p, full softmax recorded": ("truncated sampling", lambda t, r: planted.draw(OWN, keep=planted.top_p(0.9))),
    "weights rounded": ("dtype", lambda t, r: (t, planted.recomputed(OWN.rounded(), t))),
    "another version's head": ("head", lambda t, r: (t, planted.recomputed(OWN, t, head=OLD))),
    "a higher temperature": ("temperature", lambda t, r: planted.draw(OWN, temperature=1.3)),
}


def ask(capsys, tmp_path, checkpoints, made) -> tuple[int, dict, str]:
    own, old = checkpoints
    file = planted.write(tmp_path / "samples.jsonl", *made)
    status = audit.main(
        ["--samples", str(file), "--checkpoint", str(own), "--version", "1", "--stale", str(old), "--json"]
    )
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1]), text


@pytest.mark.parametrize("cause", PLANTS)
def test_each_planted_cause_is_named(cause, drawn, checkpoints, tmp_path, capsys):
    status, found, text = ask(capsys, tmp_path, checkpoints, PLANTS[cause](*drawn))
    assert found["cause"] == cause, text
    assert status == (cause != "clean")
    assert found["ok"] == (cause == "clean")
    assert found["tokens"] == planted.SAMPLES * planted.WRITTEN


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_forms_of_the_same_causes(name, drawn, checkpoints, tmp_path, capsys):
    cause, plant = MORE[name]
    status, found, text = ask(capsys, tmp_path, checkpoints, plant(*drawn))
    assert (found["cause"], status) == (cause, 1), text


def test_the_evidence_has_the_numbers(drawn, checkpoints, tmp_path, capsys):
    _, found, _ = ask(capsys, tmp_path, checkpoints, PLANTS["temperature"](*drawn))
    assert "at temperature 0.800, where 1 is recorded" in found["evidence"]


def test_samples_of_a_version_that_is_not_known_cannot_be_told(drawn, checkpoints, tmp_path, capsys):
    file = planted.write(tmp_path / "samples.jsonl", *drawn, version=7)
    status = audit.main(["--samples", str(file), "--checkpoint", str(checkpoints[0]), "--version", "1"])
    assert status == 2
    assert "written by versions [7]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"tokens": [1]}\n', "this line lacks ['logprobs', 'versions']"),
        ("nothing\n", "not JSON"),
        ('{"tokens": [1, 2], "logprobs": [-1.0], "versions": [[0, 1, 9]]}\n', "1 log-probs, and spans [[0, 1, 9]]"),
        ('{"tokens": [1, 2], "logprobs": ["NaN"], "versions": [[0, 1, 2]]}\n', "not finite"),
    ],
)
def test_files_that_hold_no_samples(line, said, checkpoints, tmp_path, capsys):
    file = tmp_path / "samples.jsonl"
    file.write_text(line, encoding="utf-8")
    assert audit.main(["--samples", str(file), "--checkpoint", str(checkpoints[0])]) == 2
    assert said in capsys.readouterr().err


def test_without_a_run_around_it_the_weights_must_be_given(drawn, tmp_path, capsys):
    file = planted.write(tmp_path / "samples.jsonl", *drawn)
    assert audit.main(["--samples", str(file)]) == 2
    assert "--checkpoint DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_knows_its_own_weights_and_is_called_clean(tmp_path, capsys):
    recipe = tiny_run.write(tmp_path)
    config = tiny_run.config(recipe, learner__updates=2, tasks__held_out=6, lora__targets=("q_proj", "down_proj"))
    train(config)
    capsys.readouterr()
    status = audit.main(["--samples", str(config.run.path / "samples.jsonl"), "--json"])
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])
    assert (found["cause"], status) == ("clean", 0), text
    assert any("checkpoint 2" in o["detail"] for o in found["outcomes"])
