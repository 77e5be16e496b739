"""Adapters in PEFT's format: names, shapes and orientation as PEFT defines them, and the way back."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.config.schema import LINEAR_LAYERS, LoraConfig
from rlx.models import lora
from rlx.models.peft import load_adapter, save_adapter
from rlx.models.presets import dense

ARCH = dense(
    "qwen2",
    vocab_size=32,
    hidden_size=12,
    intermediate_size=20,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tied=True,
    max_positions=64,
)
LINEAR_NAMES = LINEAR_LAYERS[:7]
CONFIG = LoraConfig(rank=4, alpha=8.0, targets=LINEAR_NAMES)


def random_adapter(config: LoraConfig = CONFIG):
    """Of the trainer's shapes, with both factors away from zero."""
    shapes = jax.eval_shape(lambda key: lora.init_adapter(ARCH, config, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


@pytest.fixture
def saved(tmp_path):
    save_adapter(tmp_path / "adapter", ARCH, random_adapter(), CONFIG, "models/base")
    return tmp_path / "adapter"


def test_names_and_shapes(saved):
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 3 * 7 * 2
    prefix = "base_model.model.model.layers"
    shapes = {name: tensors[name].shape for name in tensors if name.startswith(f"{prefix}.2.")}
    assert shapes == {
        f"{prefix}.2.self_attn.q_proj.lora_A.weight": (4, 12),
        f"{prefix}.2.self_attn.q_proj.lora_B.weight": (24, 4),
        f"{prefix}.2.self_attn.k_proj.lora_A.weight": (4, 12),
        f"{prefix}.2.self_attn.k_proj.lora_B.weight": (12, 4),
        f"{prefix}.2.self_attn.v_proj.lora_A.weight": (4, 12),
        f"{prefix}.2.self_attn.v_proj.lora_B.weight": (12, 4),
        f"{prefix}.2.self_attn.o_proj.lora_A.weight": (4, 24),
        f"{prefix}.2.self_attn.o_proj.lora_B.weight": (12, 4),
        f"{prefix}.2.mlp.gate_proj.lora_A.weight": (4, 12),
        f"{prefix}.2.mlp.gate_proj.lora_B.weight": (20, 4),
        f"{prefix}.2.mlp.up_proj.lora_A.weight": (4, 12),
        f"{prefix}.2.mlp.up_proj.lora_B.weight": (20, 4),
        f"{prefix}.2.mlp.down_proj.lora_A.weight": (4, 20),
        f"{prefix}.2.mlp.down_proj.lora_B.weight": (12, 4),
    }


def test_settings(saved):
    config = json.loads((saved / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    assert expected.items() <= config.items()
    assert config["base_model_name_or_path"] == "models/base"
    assert config["target_modules"] == list(LINEAR_NAMES)
    assert config["use_rslora"] is False


def test_pefts_formula_gives_our_merged_kernel(saved):
    """PEFT merges W [out, in] += (lora_alpha / r) B A."""
    tensors = load_file(saved / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    delta = 8 / 4 * tensors[name.format("B")] @ tensors[name.format("A")]
    zeros = {"layers": {"0": {"mlp": {"down_proj": {"kernel": jnp.zeros((3, 20, 12))}}}}}
    adapter = {"0": {"mlp": {"down_proj": random_adapter()["0"]["mlp"]["down_proj"]}}}
    (merged,) = jax.tree.leaves(lora.merge(zeros, adapter, lora.adapter_scale(CONFIG)))
    np.testing.assert_allclose(merged[1].T, delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [LINEAR_NAMES, ("v_proj",)])
def test_round_trip(tmp_path, targets):
    config = dataclasses.replace(CONFIG, alpha=2.5, targets=targets)
    adapter = random_adapter(config)
    save_adapter(tmp_path / "adapter", ARCH, adapter, config, "base")
    again, settings = load_adapter(tmp_path / "adapter", ARCH)
    assert settings == config
    assert jax.tree.structure(again) == jax.tree.structure(adapter)
    jax.tree.map(np.testing.assert_array_equal, again, adapter)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"use_rslora": True}, "use_rslora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_modules": ["q_proj", "qkv"]}, "qkv"),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"r": 8}, "the model and rank make them"),
    ],
)
def test_other_adapters_are_refused(saved, change, said):
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said):
        load_adapter(saved, ARCH)


def test_targets_in_any_order_are_read(saved):
    config = json.loads((saved / "adapter_config.json").read_text())
    config["target_modules"].reverse()
    (saved / "adapter_config.json").write_text(json.dumps(config))
    assert load_adapter(saved, ARCH)[1].targets == LINEAR_NAMES


def test_missing_tensor_is_named(saved):
    tensors = load_file(saved / "adapter_model.safetensors")
    name = sorted(tensors)[5]
    del tensors[name]
    save_file(tensors, saved / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=re.escape(name)):
        load_adapter(saved, ARCH)


def test_adapter_must_fit_its_settings(tmp_path):
    with pytest.raises(ValueError, match="other layers than its settings name"):
        save_adapter(tmp_path / "a", ARCH, random_adapter(), dataclasses.replace(CONFIG, targets=("q_proj",)), "base")
    with pytest.raises(ValueError, match="have shapes"):
        save_adapter(tmp_path / "a", ARCH, random_adapter(), dataclasses.replace(CONFIG, rank=2), "base")
    assert list(tmp_path.iterdir()) == []
