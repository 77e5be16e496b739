"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

PEFT keeps lora_A as [r, in] and lora_B as [out, r] of every adapted linear layer; here they are a [L, in, r] and
b [L, r, out] of all layers at once (see `models.lora`). The scale alpha / r is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from rlx.config.schema import LoraConfig
from rlx.models.files import new_directory, read_json, write_json
from rlx.models.hf import TENSOR_NAMES
from rlx.models.spec import LINEAR_NAMES, Architecture, Params, linear_shape

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

# Variants of PEFT's LoRA that compute something else, with the value that means "off".
UNSUPPORTED = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def to_peft(arch: Architecture, adapter: Params) -> Iterator[tuple[str, Any]]:
    """(PEFT's name, array) of every tensor, in the array library of `adapter`: lora_A [r, in], lora_B [out, r]."""
    for target, low_rank in adapter.items():
        for layer in range(arch.num_layers):
            name_a, name_b = _names(target, layer)
            yield name_a, low_rank["a"][layer].T
            yield name_b, low_rank["b"][layer].T


def adapter_config(config: LoraConfig, base_path: Path | str) -> dict[str, Any]:
    """adapter_config.json; `base_path` is the model directory (or hub name) that the adapter was trained on."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path),
        "revision": None,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": list(config.targets),
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
        **UNSUPPORTED,
    }


def save_adapter(
    directory: Path | str, arch: Architecture, adapter: Params, config: LoraConfig, base_path: Path | str
) -> None:
    """Writes a PEFT directory, whole or not at all.

    Raises FileExistsError where it exists, ValueError where the adapter is not of `config`'s targets and rank.
    """
    _check_shapes(arch, adapter, config)
    tensors = {name: np.ascontiguousarray(jax.device_get(array)) for name, array in to_peft(arch, adapter)}
    with new_directory(directory) as out:
        write_json(out / CONFIG_FILE, adapter_config(config, base_path))
        save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapter(directory: Path | str, arch: Architecture) -> tuple[Params, LoraConfig]:
    """The adapter as numpy arrays and its settings.

    Raises FileNotFoundError where a file is missing, ValueError where the adapter is of another kind or another model.
    """
    directory = Path(directory)
    config = _parse_config(read_json(directory / CONFIG_FILE))
    tensors = load_file(directory / WEIGHTS_FILE)
    expected = {name for target in config.targets for i in range(arch.num_layers) for name in _names(target, i)}
    if set(tensors) != expected:
        missing, unexpected = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        raise ValueError(f"{directory} does not fit the model: lacks {missing[:4]}, has unexpected {unexpected[:4]}")
    adapter = {target: _stack(tensors, target, arch.num_layers) for target in config.targets}
    _check_shapes(arch, adapter, config)
    return adapter, config


def _names(target: str, layer: int) -> tuple[str, str]:
    module = TENSOR_NAMES[f"layers/{target}/kernel"].format(layer=layer).removesuffix(".weight")
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def _stack(tensors: Mapping[str, np.ndarray[Any, Any]], target: str, layers: int) -> dict[str, np.ndarray[Any, Any]]:
    pairs = [[tensors[name].T for name in _names(target, layer)] for layer in range(layers)]
    return {key: np.stack([pair[i] for pair in pairs]) for i, key in enumerate("ab")}


def _parse_config(config: Mapping[str, Any]) -> LoraConfig:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {config.get('peft_type')!r} is not supported: LORA is")
    for key, off in UNSUPPORTED.items():
        if config.get(key) not in (off, None, []):
            raise ValueError(f"{CONFIG_FILE}: {key} {config[key]!r} is not supported: {off!r} is")
    targets = config["target_modules"]
    unknown = sorted(set(targets) - set(LINEAR_NAMES)) if isinstance(targets, list) else [targets]
    if unknown:
        raise ValueError(f"target_modules {unknown} are not linear layers of a block: {', '.join(LINEAR_NAMES)} are")
    ordered = tuple(name for name in LINEAR_NAMES if name in targets)  # PEFT writes a set, in any order
    return LoraConfig(rank=config["r"], alpha=float(config["lora_alpha"]), targets=ordered)


def _check_shapes(arch: Architecture, adapter: Params, config: LoraConfig) -> None:
    if set(adapter) != set(config.targets):
        raise ValueError(f"the adapter has {sorted(adapter)}, its settings name {sorted(config.targets)}")
    for target, low_rank in adapter.items():
        inputs, outputs = linear_shape(arch, target)
        wanted = (arch.num_layers, inputs, config.rank), (arch.num_layers, config.rank, outputs)
        found = tuple(low_rank["a"].shape), tuple(low_rank["b"].shape)
        if found != wanted:
            raise ValueError(f"adapter of {target}: a, b have shapes {found}; the model and rank make them {wanted}")
