"""The parameters of a model: for every one its shape, logical axes and initializer, from the model's description."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import traverse_util

from rlx.models import mlp, moe, residual
from rlx.models.description import Architecture, Experts, Layer, Params, ParamSpec, slots
from rlx.models.kinds import kind
from rlx.models.weights import norm_spec

__all__ = ["Architecture", "ParamSpec", "Params", "count_parameters", "init_params", "layer_specs", "param_specs"]


def param_specs(arch: Architecture) -> Params:
    """The parameter tree of `arch` with a ParamSpec at every leaf. Kernels are [in, out]: y = x @ kernel.

    "layers" has a tree for each slot (`description.slots`), whose leaves lead with the axis of the slot's layers.
    """
    hidden = arch.hidden_size
    specs: Params = {
        "embed": ParamSpec((arch.vocab_size, hidden), ("vocab", "embed"), "normal"),
        "layers": {slot.name: _stacked(layer_specs(arch, slot.layer), len(slot.numbers)) for slot in slots(arch)},
        "final_norm": norm_spec(arch.norm, hidden, "embed"),
    }
    specs |= residual.output_specs(arch)
    if not arch.tied:
        specs["head"] = ParamSpec((arch.vocab_size, hidden), ("vocab", "embed"), "normal")
    return specs


def layer_specs(arch: Architecture, layer: Layer) -> Params:
    """Of one layer, without the leading axis."""
    norm = norm_spec(arch.norm, arch.hidden_size, "embed")
    feed = layer.mlp
    return {
        "mixer_norm": norm,
        "mixer": kind(layer.mixer).specs(layer.mixer, arch),
        "mlp_norm": norm,
        "mlp": moe.specs(feed, arch) if isinstance(feed, Experts) else mlp.specs(feed, arch),
        **residual.layer_specs(arch),
    }


def _stacked(specs: Params, count: int) -> Params:
    def stack(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, shape=(count, *spec.shape), axes=("layer", *spec.axes))

    return jax.tree.map(stack, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def count_parameters(arch: Architecture) -> int:
    return count(param_specs(arch))


def count(specs: Params) -> int:
    """Numbers in the leaves of a tree of ParamSpec, in Python's integers: 32 bits are not enough."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return sum(math.prod(s.shape) for s in leaves)


def init_params(arch: Architecture, key: jax.Array, dtype: jnp.dtype = jnp.float32, scale: float = 0.02) -> Params:
    """Random parameters of `arch`; every leaf draws from a key of its own, so adding one changes no other."""

    def init(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        if spec.initializer == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.initializer == "zeros":
            return jnp.zeros(spec.shape, dtype)
        leaf_key = jax.random.fold_in(key, stable_hash("/".join(path)))
        return (scale * jax.random.normal(leaf_key, spec.shape)).astype(dtype)

    flat = traverse_util.flatten_dict(param_specs(arch))
    return traverse_util.unflatten_dict({path: init(path, spec) for path, spec in flat.items()})


def stable_hash(text: str) -> int:
    """FNV-1a over the bytes: `hash` differs between processes."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
