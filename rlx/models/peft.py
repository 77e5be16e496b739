"""LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors.

PEFT keeps lora_A as [r, in] and lora_B as [out, r] of every adapted linear layer; here they are a [L, in, r] and
b [L, r, out] of all layers of a slot at once (see `models.lora`). The scale alpha / r is the same.

Where PEFT has no names the files have those that SGLang reads: in_proj_q, in_proj_k and in_proj_v for the parts of
in_proj_qkv; experts.E.gate_proj and so on for adapters of single experts; experts.gate_up_proj and experts.down_proj,
[E or 1, r, in] and [E or 1, out, r], where experts share the outer factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from rlx.config.schema import LoraConfig
from rlx.models.description import Architecture, Params
from rlx.models.files import new_directory, read_json, write_json
from rlx.models.lora import Linear, adapter_specs, linears, targets

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


class PeftTensor(NamedTuple):
    """Where one tensor of the file lives in the adapter's tree."""

    path: str  # of the leaf, joined by "/"
    part: tuple[int, ...]  # of the leaf: the layer, and the expert
    shape: tuple[int, ...]  # as stored


def peft_tensors(arch: Architecture, config: LoraConfig) -> dict[str, PeftTensor]:
    """Every tensor of an adapter of `config` by PEFT's name."""
    tensors: dict[str, PeftTensor] = {}
    flat = traverse_util.flatten_dict(adapter_specs(arch, config))
    for linear in targets(arch, config):
        own = (linear.slot.name, *linear.path)
        for path, spec in flat.items():
            if path[: len(own)] == own:
                *parts, factor = path[len(own) :]
                for name, index in _modules(arch, linear, config, parts):
                    shape = spec.shape[len(index) :]
                    shared = linear.routed and config.experts == "shared_outer"
                    wide = _experts_first(shape) if shared else shape
                    stored = (*wide[:-2], wide[-1], wide[-2])
                    tensors[f"{PREFIX}{name}.lora_{factor.upper()}.weight"] = PeftTensor("/".join(path), index, stored)
    return tensors


def _experts_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """With an axis of experts, of 1 where they share the factor."""
    return shape if len(shape) == 3 else (1, *shape)


def _modules(
    arch: Architecture, linear: Linear, config: LoraConfig, parts: list[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(module, index of its part of a leaf), for all layers and, where each has its own, all experts."""
    parent, _, own = linear.name.rpartition(".")
    name = parts[0] if parts else own
    for i, number in enumerate(linear.slot.numbers):
        layer = f"{arch.names.model}layers.{number}"
        if linear.routed and config.experts == "per_expert":
            for expert in range(linear.spec.shape[0]):
                yield f"{layer}.{parent}.{expert}.{name}", (i, expert)
        else:
            yield f"{layer}.{parent}.{name}" if parent else f"{layer}.{name}", (i,)


def to_peft(arch: Architecture, adapter: Params, config: LoraConfig) -> Iterator[tuple[str, Any]]:
    """(PEFT's name, array) of every tensor, in the array library of `adapter`: lora_A [r, in], lora_B [out, r]."""
    flat = traverse_util.flatten_dict(adapter, sep="/")
    for name, tensor in peft_tensors(arch, config).items():
        yield name, flat[tensor.path][tensor.part].swapaxes(-1, -2).reshape(tensor.shape)


def adapter_config(arch: Architecture, config: LoraConfig, base_path: Path | str) -> dict[str, Any]:
    """adapter_config.json; `base_path` is the model directory (or hub name) that the adapter was trained on."""
    modules = config.targets
    if any(not name.isidentifier() for name in modules):  # patterns: PEFT has names alone
        modules = tuple(dict.fromkeys(_module_of(name) for name in peft_tensors(arch, config)))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path),
        "revision": None,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "target_modules": list(modules),
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
    tensors = {name: np.ascontiguousarray(jax.device_get(array)) for name, array in to_peft(arch, adapter, config)}
    with new_directory(directory) as out:
        write_json(out / CONFIG_FILE, adapter_config(arch, config, base_path))
        save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapter(directory: Path | str, arch: Architecture) -> tuple[Params, LoraConfig]:
    """The adapter as numpy arrays and its settings.

    Raises FileNotFoundError where a file is missing, ValueError where the adapter is of another kind or another model.
    """
    directory = Path(directory)
    tensors = load_file(directory / WEIGHTS_FILE)
    config = _parse_config(arch, read_json(directory / CONFIG_FILE), tensors)
    expected = peft_tensors(arch, config)
    if set(tensors) != set(expected):
        missing, unexpected = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
        raise ValueError(f"{directory} does not fit the model: lacks {missing[:4]}, has unexpected {unexpected[:4]}")
    specs = traverse_util.flatten_dict(adapter_specs(arch, config), sep="/")
    leaves = {path: np.empty(spec.shape, np.float32) for path, spec in specs.items()}
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tensors[name].shape}; the model and rank make them {tensor.shape}")
        target = leaves[tensor.path][tensor.part]
        target[...] = tensors[name].swapaxes(-1, -2).reshape(target.shape)
    return traverse_util.unflatten_dict(leaves, sep="/"), config


def _module_of(tensor: str) -> str:
    """The last part of the name of the module that a tensor is of."""
    return tensor.rpartition(".lora_")[0].rpartition(".")[2]


def _parse_config(arch: Architecture, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> LoraConfig:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type {config.get('peft_type')!r} is not supported: LORA is")
    for key, off in UNSUPPORTED.items():
        if config.get(key) not in (off, None, []):
            raise ValueError(f"{CONFIG_FILE}: {key} {config[key]!r} is not supported: {off!r} is")
    named = config["target_modules"]
    known = {_module_of(name) for name in peft_tensors(arch, _everything(arch, config, tensors))}
    unknown = sorted(set(named) - known) if isinstance(named, list) else [named]
    if unknown:
        raise ValueError(f"target_modules {unknown} are not linear layers of a block: {', '.join(sorted(known))} are")
    if strange := sorted({_module_of(name) for name in tensors} - set(named)):
        raise ValueError(f"target_modules {named} do not name {strange}, of which there are unexpected tensors")
    return _narrowed(arch, _everything(arch, config, tensors), named, set(tensors))


def _everything(arch: Architecture, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> LoraConfig:
    """All linear layers, routed experts in the form that the file has."""
    names = tuple(dict.fromkeys(linear.name for linear in linears(arch)))
    apart = any(part.isdecimal() for name in tensors for part in name.partition(".experts.")[2].split(".")[:1])
    return LoraConfig(config["r"], float(config["lora_alpha"]), names, "per_expert" if apart else "shared_outer")


def _narrowed(arch: Architecture, every: LoraConfig, named: list[str], tensors: set[str]) -> LoraConfig:
    """The settings under which the adapter has these tensors: PEFT's names where they say enough, else whole names."""
    if not any(".experts." in name for name in tensors):  # which a plain name does not mean here
        order = dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears(arch))
        plain = tuple(name for name in order if name in named)
        config = dataclasses.replace(every, targets=plain, experts="per_expert")
        if len(plain) == len(named):
            return config
    alone = {name: set(peft_tensors(arch, dataclasses.replace(every, targets=(name,)))) for name in every.targets}
    return dataclasses.replace(every, targets=tuple(name for name, own in alone.items() if own & tensors))


def _check_shapes(arch: Architecture, adapter: Params, config: LoraConfig) -> None:
    specs = traverse_util.flatten_dict(adapter_specs(arch, config), sep="/")
    found = traverse_util.flatten_dict(adapter, sep="/")
    if set(found) != set(specs):
        odd = sorted(set(found) ^ set(specs))
        raise ValueError(f"the adapter has other layers than its settings name, {list(config.targets)}: {odd[:4]}")
    for path, spec in specs.items():
        if tuple(found[path].shape) != spec.shape:
            raise ValueError(
                f"adapter: {path} and others have shapes like {tuple(found[path].shape)}; the model and rank make them "
                f"{spec.shape}"
            )
