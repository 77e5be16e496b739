"""`rlx verify-model` on the stored references, on both styles of config.json, and on models that are wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx import verify

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def model(tmp_path):
    """Copies a fixture, with the config.json of the style asked for."""

    def copy(name: str, config: str = "config.json") -> Path:
        directory = tmp_path / name
        shutil.copytree(FIXTURES / name, directory)
        shutil.copyfile(FIXTURES / name / config, directory / "config.json")
        return directory

    return copy


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("config", ["config.json", "config.legacy.json"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_tied"])
def test_fixture_agrees(model, capsys, name, config):
    directory = model(name, config)
    assert verify.main([str(directory), "--reference", str(directory / "reference.npz"), "--json"]) == 0
    result = last_line(capsys)
    assert list(result)[:4] == ["ok", "max_logit_error", "max_logprob_error", "max_gradient_norm_error"]
    assert list(result)[4:] == ["max_hidden_state_error", "tokens_routed_otherwise"]
    assert result["ok"] is True
    assert 0 < result["max_logit_error"] <= 1e-4
    assert 0 < result["max_logprob_error"] <= 1e-4
    assert 0 < result["max_gradient_norm_error"] <= 1e-3


def test_every_quantity_is_compared(model):
    reference = verify.read_reference(FIXTURES / "qwen2" / "reference.npz")
    names = [d.name for d in verify.verify(model("qwen2"), reference)]
    meta = json.loads((FIXTURES / "qwen2" / "meta.json").read_text())
    gradients = [f"gradient norm, {name}" for name in meta["grad_norms_by_torch_param"]]
    hidden = [f"hidden states, {i}" for i in range(3)]
    assert names == ["logits", "token log-probs", "logits, left-padded", *hidden, *gradients]


def test_changed_weight_is_found(model, capsys):
    directory = model("qwen3")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.k_norm.weight"][0] += 0.05
    save_file(tensors, directory / "model.safetensors")
    assert verify.main([str(directory), "--json"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert json.loads(output.splitlines()[-1])["ok"] is False


def test_weight_that_is_not_finite_is_found_and_stays_json(model, capsys):
    directory = model("qwen3")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, directory / "model.safetensors")
    assert verify.main([str(directory), "--json"]) == 1
    assert last_line(capsys) == {
        "ok": False,
        "max_logit_error": None,
        "max_logprob_error": None,
        "max_gradient_norm_error": None,
        "max_hidden_state_error": None,
        "tokens_routed_otherwise": None,
    }


def test_left_padded_case_decides_too():
    """The stored case is not implied by the full logits: rows see only what follows the padding."""
    arrays = np.load(FIXTURES / "qwen3" / "reference.npz")
    assert np.abs(arrays["logits_left_pad_row1_last8"] - arrays["logits"][1, -8:]).max() > 1


def test_a_wrong_gradient_alone_fails():
    good = [verify.Difference("logits", 1e-6, 1e-4), verify.Difference("token log-probs", 1e-6, 1e-4)]
    assert verify.summary([*good, verify.Difference("gradient norm, x", 9e-4, 1e-3)])["ok"]
    assert not verify.summary([*good, verify.Difference("gradient norm, x", 2e-3, 1e-3)])["ok"]


@pytest.mark.parametrize(
    "name, content", [("config.json", b"{"), ("model.safetensors", b"x"), ("reference.npz", b"PK")]
)
def test_damaged_file_exits_2(model, capsys, name, content):
    directory = model("qwen2")
    (directory / name).write_bytes(content)
    assert verify.main([str(directory)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "reference.npz", "meta.json"])
def test_missing_file_exits_2(model, capsys, name):
    directory = model("qwen2")
    (directory / name).unlink()
    assert verify.main([str(directory), "--json"]) == 2
    captured = capsys.readouterr()
    assert name in captured.err
    assert captured.out == ""


def test_reference_of_another_model_exits_2(model, capsys):
    directory = model("qwen3_tied")
    assert verify.main([str(directory), "--reference", str(FIXTURES / "qwen3" / "reference.npz")]) == 2
    assert "lm_head.weight" in capsys.readouterr().err
