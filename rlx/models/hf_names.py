"""The names of tensors in a Hugging Face checkpoint, for every leaf of the parameter tree: the one place that knows.

A linear weight is [out, in] in a checkpoint and a kernel [in, out] here; layers of a slot are stacked on a leading axis
here; the experts of a layer are one leaf here, and one tensor or one for each expert there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from flax import traverse_util

from rlx.models.description import Architecture, DeltaNet, Experts, KimiDelta, Layer, Names, ParamSpec, slots
from rlx.models.spec import layer_specs, param_specs

BARE = ("A_log", "dt_bias")  # stored without ".weight"


class HfTensor(NamedTuple):
    """Where one tensor of the checkpoint lives in the parameter tree."""

    path: str  # of the leaf, joined by "/"
    part: tuple[Any, ...]  # of the leaf: an index of it
    transposed: bool  # the last two axes are stored the other way round
    shape: tuple[int, ...]  # as stored


def hf_tensors(arch: Architecture) -> dict[str, HfTensor]:
    """Every tensor of a checkpoint of `arch` by its Hugging Face name, layer by layer."""
    tensors: dict[str, HfTensor] = {}
    flat = traverse_util.flatten_dict({k: v for k, v in param_specs(arch).items() if k != "layers"}, sep="/")
    for path, spec in flat.items():
        name, shape = _top_level(arch, path, spec)
        tensors[name] = HfTensor(path, (), False, shape)
    by_number = {number: (slot, i) for slot in slots(arch) for i, number in enumerate(slot.numbers)}
    stored = {slot.name: list(layer_tensors(arch, slot.layer)) for slot in slots(arch)}
    for number in range(arch.num_layers):
        slot, i = by_number[number]
        for name, tensor in stored[slot.name]:
            path, part = f"layers/{slot.name}/{tensor.path}", (i, *tensor.part)
            tensors[f"{arch.names.model}layers.{number}.{name}"] = tensor._replace(path=path, part=part)
    return tensors


def _top_level(arch: Architecture, path: str, spec: ParamSpec) -> tuple[str, tuple[int, ...]]:
    names = {
        "embed": f"{arch.names.model}embed_tokens.weight",
        "final_norm": f"{arch.names.model}norm.weight",
        "head": arch.names.head,
    }
    if path in names:
        return names[path], spec.shape
    return f"{arch.names.model}{path}.weight", _row(path, spec.shape)


def layer_tensors(arch: Architecture, layer: Layer) -> Iterator[tuple[str, HfTensor]]:
    """(name after "layers.N.", tensor) of one layer; paths and indices are those within the layer."""
    for path, spec in traverse_util.flatten_dict(layer_specs(arch, layer), sep="/").items():
        if path.startswith("mlp/experts/") and isinstance(layer.mlp, Experts):
            yield from _expert_tensors(arch.names, layer.mlp, path, spec)
        elif path.endswith("conv1d"):
            yield from _convolutions(arch, layer, path, spec)
        else:
            transposed = path.endswith("/kernel")
            shape = spec.shape[::-1] if transposed else _stored_shape(layer, path, spec.shape)
            yield layer_name(arch, layer, path), HfTensor(path, (), transposed, shape)


def layer_name(arch: Architecture, layer: Layer, path: str) -> str:
    """Of a tensor of one layer, after "layers.N."."""
    norms = arch.names.pre_norms if layer.norms == "pre" else arch.names.post_norms
    if path in ("mixer_norm", "mlp_norm"):
        return f"{norms[path == 'mlp_norm']}.weight"
    part, _, rest = path.partition("/")
    if not rest:
        return f"{path}.weight"
    return f"{module_of(arch, layer, part)}.{_within(arch.names, rest)}"


def module_name(arch: Architecture, layer: Layer, path: tuple[str, ...]) -> str:
    """Of a linear layer, after "layers.N."; the experts of a layer as if they were one."""
    if path[:2] == ("mlp", "experts"):
        return f"{arch.names.experts}.experts.{path[2]}"
    return layer_name(arch, layer, "/".join((*path, "kernel"))).removesuffix(".weight")


def module_of(arch: Architecture, layer: Layer, part: str) -> str:
    """The module of a layer's mixer or MLP."""
    if part == "mlp":
        return arch.names.experts if isinstance(layer.mlp, Experts) else "mlp"
    return arch.names.recurrent if isinstance(layer.mixer, DeltaNet) else "self_attn"


def _within(names: Names, path: str) -> str:
    """Of a leaf in its module; path: after "mixer/" or "mlp/"."""
    head, _, leaf = path.rpartition("/")
    if head in ("router", "router_bias") or path == "router_bias":
        return "gate.weight" if head == "router" else "gate.e_score_correction_bias"
    if head.startswith("shared/"):
        return f"{names.shared}.{head.removeprefix('shared/')}.weight"
    if head == "shared_gate":
        return f"{names.shared}_gate.weight"
    if leaf in BARE:
        return leaf
    if path in ("out_proj/kernel", "norm"):
        return f"{names.recurrent_out[path == 'norm']}.weight"
    if leaf == "kernel":
        return f"{head}.weight"
    return f"{head}.bias" if leaf == "bias" else f"{leaf}.weight"


def _stored_shape(layer: Layer, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if path.endswith("A_log") and isinstance(layer.mixer, KimiDelta) and layer.mixer.lower_bound is None:
        return (1, 1, *shape, 1)
    return _row(path, shape)


def _convolutions(arch: Architecture, layer: Layer, path: str, spec: ParamSpec) -> Iterator[tuple[str, HfTensor]]:
    """One over queries, keys and values, or three, which lie one after the other in the leaf."""
    module, (channels, width), mixer = module_of(arch, layer, "mixer"), spec.shape, layer.mixer
    if isinstance(mixer, DeltaNet) and mixer.form != "apart":
        yield f"{module}.conv1d.weight", HfTensor(path, (), False, (channels, 1, width))
        return
    apart = isinstance(mixer, DeltaNet) and not arch.names.even_convolutions
    keys = mixer.key_heads * mixer.key_dim if apart and isinstance(mixer, DeltaNet) else channels // 3
    for name, start, end in (("q", 0, keys), ("k", keys, 2 * keys), ("v", 2 * keys, channels)):
        stored = (end - start, 1, width)
        yield f"{module}.{name}_conv1d.weight", HfTensor(path, (slice(start, end),), False, stored)


def _row(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The vectors that weigh a bank of snapshots are linear layers with one output."""
    return (1, *shape) if path.endswith("res_proj") else shape


def _expert_tensors(names: Names, experts: Experts, path: str, spec: ParamSpec) -> Iterator[tuple[str, HfTensor]]:
    name = path.rpartition("/")[2]
    count, inputs, outputs = spec.shape
    if names.fused_experts:
        yield f"{names.experts}.experts.{name}", HfTensor(path, (), True, (count, outputs, inputs))
        return
    gate, up, down = names.expert_parts
    width = experts.width
    parts = {gate: slice(0, width), up: slice(width, 2 * width)} if name == "gate_up_proj" else {down: slice(None)}
    for expert in range(count):
        for part, columns in parts.items():
            shape = (len(range(outputs)[columns]), inputs)
            yield (
                f"{names.experts}.experts.{expert}.{part}.weight",
                HfTensor(path, (expert, slice(None), columns), True, shape),
            )


def found_names(names: Names, tensors: Collection[str]) -> Names:
    """`names` as a checkpoint with these tensors has them: prefixes, experts fused or one by one, and the two spellings
    that OLMo hybrids are exported in."""
    for name in tensors:
        if name.endswith("embed_tokens.weight"):
            names = dataclasses.replace(names, model=name.removesuffix("embed_tokens.weight"))
        elif name.endswith("lm_head.weight"):
            names = dataclasses.replace(names, head=name)
        elif name.endswith((f".{names.recurrent}.out_proj.weight", f".{names.recurrent}.norm.weight")):
            names = dataclasses.replace(names, recurrent_out=("out_proj", "norm"))
        elif name.endswith(".input_layernorm.weight"):
            names = dataclasses.replace(names, pre_norms=("input_layernorm", "post_attention_layernorm"))
    fused = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    return dataclasses.replace(names, fused_experts=fused)
