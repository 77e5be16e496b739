"""LoRA adapters (arXiv 2106.09685) as trees beside the parameters: W + (alpha / rank) A B with W frozen.

An adapter has the tree of params["layers"] as far as it adapts it; in the place of a linear layer's parameters stand
{"a": [L, in, r], "b": [L, r, out]}, or one such pair for each projection that the kernel holds side by side. Routed
experts have one of two forms:

    per_expert     a [L, E, in, r], b [L, E, r, out] of each of gate_proj, up_proj, down_proj
    shared_outer   the factor at the layer's width is shared by its experts: gate_up_proj has a [L, in, r] and
                   b [L, E, r, 2 w], down_proj has a [L, E, w, r] and b [L, r, out]
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array

from rlx.config.schema import LoraConfig
from rlx.models.description import Architecture, Params, ParamSpec, Slot, slots
from rlx.models.hf_names import module_name
from rlx.models.spec import layer_specs, stable_hash

Path = tuple[str, ...]


class Linear(NamedTuple):
    """A linear layer of a slot, or a layer's routed experts' one."""

    slot: Slot
    path: Path  # in the layer
    name: str  # what patterns see: the module's name in a layer of the checkpoint
    spec: ParamSpec  # of one layer's kernel

    @property
    def routed(self) -> bool:
        """Of experts: the kernel leads with their axis."""
        return len(self.spec.shape) == 3


def adapter_scale(config: LoraConfig) -> float:
    return config.alpha / config.rank if config.rank else 1.0


def linears(arch: Architecture) -> Iterator[Linear]:
    """Every linear layer that can be adapted: all but routers and their like, which have one output a choice."""
    for slot in slots(arch):
        for path, spec in traverse_util.flatten_dict(layer_specs(arch, slot.layer)).items():
            routed = path[:2] == ("mlp", "experts")
            if routed or (path[-1] == "kernel" and path[-2] not in ("router", "shared_gate")):
                module = path if routed else path[:-1]
                yield Linear(slot, module, module_name(arch, slot.layer, module), spec)


def matches(pattern: str, linear: Linear) -> bool:
    """A pattern is a name's end, from a dot on, with * and ? of the shell; routed experts are meant only by patterns
    that say "experts", as they are most of a model."""
    if linear.routed and "experts" not in pattern:
        return False
    return fnmatch.fnmatchcase(linear.name, pattern) or fnmatch.fnmatchcase(linear.name, f"*.{pattern}")


def targets(arch: Architecture, config: LoraConfig) -> list[Linear]:
    """The linear layers that `config` adapts. Raises ValueError for a pattern that means none of the model's."""
    every = list(linears(arch))
    for pattern in config.targets:
        if not any(matches(pattern, linear) for linear in every):
            names = sorted({linear.name for linear in every})
            shown = [*(n.partition(".")[2] for n in names), *(f"{n.rpartition('.')[0]}.*" for n in names)]
            near = difflib.get_close_matches(pattern, shown, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"lora.targets: {pattern!r} is no linear layer of this {arch.model_type} model, which has "
                f"{', '.join(names)}{hint}"
            )
    return [linear for linear in every if any(matches(pattern, linear) for pattern in config.targets)]


def adapter_specs(arch: Architecture, config: LoraConfig) -> Params:
    """The adapter's tree with a ParamSpec at every leaf; `b` starts at zero."""
    flat: dict[Path, ParamSpec] = {}
    for linear in targets(arch, config):
        for place, spec in _factors(linear, config).items():
            stacked = ParamSpec((len(linear.slot.numbers), *spec.shape), ("layer", *spec.axes), spec.initializer)
            flat[(linear.slot.name, *linear.path, *place)] = stacked
    return traverse_util.unflatten_dict(flat)


def _factors(linear: Linear, config: LoraConfig) -> dict[Path, ParamSpec]:
    """The factors of one layer by their place below the linear layer's own."""
    *experts, inputs, outputs = linear.spec.shape
    expert_axes, (in_axis, out_axis) = linear.spec.axes[: len(experts)], linear.spec.axes[-2:]
    shared = linear.routed and config.experts == "shared_outer"
    inward = linear.path[-1] != "down_proj"
    if shared:
        a_experts, b_experts = ((), tuple(experts)) if inward else (tuple(experts), ())
    else:
        a_experts = b_experts = tuple(experts)

    def pair(outputs: int) -> dict[str, ParamSpec]:
        a_axes, b_axes = (expert_axes if lead else () for lead in (a_experts, b_experts))
        return {
            "a": ParamSpec((*a_experts, inputs, config.rank), (*a_axes, in_axis, "rank"), "normal"),
            "b": ParamSpec((*b_experts, config.rank, outputs), (*b_axes, "rank", out_axis), "zeros"),
        }

    if shared or not linear.spec.parts:
        return {(key,): spec for key, spec in pair(outputs).items()}
    return {(part, key): spec for part, size in linear.spec.parts for key, spec in pair(size).items()}


def init_adapter(arch: Architecture, config: LoraConfig, key: jax.Array) -> Params:
    """A fresh adapter, float32. B is zero: the first forward is the base model's.

    A is uniform in ±1/sqrt(in), Kaiming's bound with a = sqrt(5), as PEFT initialises it. Raises what `targets` does.
    """

    def init(path: Path, spec: ParamSpec) -> jax.Array:
        if spec.initializer == "zeros":
            return jnp.zeros(spec.shape, jnp.float32)
        bound = spec.shape[-2] ** -0.5
        leaf_key = jax.random.fold_in(key, stable_hash("/".join(path)))
        return jax.random.uniform(leaf_key, spec.shape, jnp.float32, -bound, bound)

    flat = traverse_util.flatten_dict(adapter_specs(arch, config))
    return traverse_util.unflatten_dict({path: init(path, spec) for path, spec in flat.items()})


# --------------------------------------------------------------------------------------------------------------- merge


def kernels(params: Params, adapter: Params) -> dict[Path, Array]:
    """The kernels that `adapter` changes, by their path in `params`."""
    return {("layers", *path): _at(params["layers"], path) for path, _ in _entries(params["layers"], adapter)}


def merge(params: Params, adapter: Params, scale: float) -> Params:
    """Parameters with the adapter added into the kernels, for engines and exports. Shares what it does not change."""
    return replaced(params, merged_kernels(params, adapter, scale))


def unmerge(params: Params, adapter: Params, scale: float) -> Params:
    """`merge` undone, up to rounding in the parameters' dtype."""
    return merge(params, adapter, -scale)


def merged_kernels(params: Params, adapter: Params, scale: float) -> dict[Path, Array]:
    """The kernels that `adapter` changes, changed; sums in float32, rounded once."""

    def added(kernel: Array, entry: Params) -> Array:
        return (kernel.astype(jnp.float32) + scale * _delta(entry, kernel.ndim)).astype(kernel.dtype)

    layers = params["layers"]
    return {("layers", *path): added(_at(layers, path), entry) for path, entry in _entries(layers, adapter)}


def replaced(params: Params, kernels: dict[Path, Array]) -> Params:
    """`params` with other kernels in some places, the rest shared."""
    return traverse_util.unflatten_dict(traverse_util.flatten_dict(params) | kernels)


def _entries(params: Params, adapter: Params, path: Path = ()) -> Iterator[tuple[Path, Params]]:
    """(path of a kernel, what the adapter has for it)."""
    for name, node in adapter.items():
        found = params[name]
        if not isinstance(found, dict):
            yield (*path, name), node
        elif "kernel" in found:
            yield (*path, name, "kernel"), node
        else:
            yield from _entries(found, node, (*path, name))


def _at(tree: Params, path: Path) -> Any:
    """An array, or a subtree."""
    for name in path:
        tree = tree[name]
    return tree


def _delta(entry: Params, ndim: int) -> Array:
    """A B of every layer, and expert, of a kernel with so many axes."""
    if "a" not in entry:
        return jnp.concatenate([_delta(part, ndim) for part in entry.values()], axis=-1)
    a, b = (jnp.expand_dims(x, 1) if x.ndim < ndim else x for x in (entry["a"], entry["b"]))
    return jnp.matmul(a, b)
