"""What a model is made of: its architecture's numbers and, for every parameter, shape, logical axes and initializer."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import traverse_util

from rlx.config.schema import LINEAR_LAYERS

LINEAR_NAMES = LINEAR_LAYERS

Params = dict  # nested dicts of arrays (or of ParamSpec, or of adapters): a plain pytree


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A dense decoder: pre-norm blocks of grouped-query attention and SwiGLU (Qwen2, Qwen2.5, Qwen3)."""

    model_type: Literal["qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool  # the output head is the embedding
    max_positions: int


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. `axes` names each dimension for sharding rules; the leading "layer" axis stacks the blocks."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Literal["normal", "ones", "zeros"]


def linear_shape(arch: Architecture, name: str) -> tuple[int, int]:
    """(inputs, outputs) of the linear layer `name` of a block."""
    hidden, mlp = arch.hidden_size, arch.intermediate_size
    query, key_value = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }[name]


_LINEAR_AXES = {
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
}


def _linear(arch: Architecture, name: str) -> dict[str, ParamSpec]:
    layers, shape, axes = arch.num_layers, linear_shape(arch, name), _LINEAR_AXES[name]
    specs = {"kernel": ParamSpec((layers, *shape), ("layer", *axes), "normal")}
    if arch.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
        specs["bias"] = ParamSpec((layers, shape[1]), ("layer", axes[1]), "zeros")
    return specs


def param_specs(arch: Architecture) -> Params:
    """The parameter tree of `arch` with a ParamSpec at every leaf. Kernels are [in, out]: y = x @ kernel."""
    layers, hidden = arch.num_layers, arch.hidden_size
    norm = ParamSpec((layers, hidden), ("layer", "embed"), "ones")
    block: Params = {"input_layernorm": norm, "post_attention_layernorm": norm}
    block |= {name: _linear(arch, name) for name in LINEAR_NAMES}
    if arch.qk_norm:
        block |= {n: ParamSpec((layers, arch.head_dim), ("layer", "head_dim"), "ones") for n in ("q_norm", "k_norm")}
    specs: Params = {
        "embed": ParamSpec((arch.vocab_size, hidden), ("vocab", "embed"), "normal"),
        "layers": block,
        "final_norm": ParamSpec((hidden,), ("embed",), "ones"),
    }
    if not arch.tied:
        specs["head"] = ParamSpec((arch.vocab_size, hidden), ("vocab", "embed"), "normal")
    return specs


def count_parameters(arch: Architecture) -> int:
    leaves = jax.tree.leaves(param_specs(arch), is_leaf=lambda x: isinstance(x, ParamSpec))
    return sum(math.prod(s.shape) for s in leaves)


def init_params(arch: Architecture, key: jax.Array, dtype: jnp.dtype = jnp.float32, scale: float = 0.02) -> Params:
    """Random parameters of `arch`; every leaf draws from a key of its own, so adding one changes no other."""

    def init(path: tuple[str, ...], spec: ParamSpec) -> jax.Array:
        if spec.initializer == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.initializer == "zeros":
            return jnp.zeros(spec.shape, dtype)
        leaf_key = jax.random.fold_in(key, _stable_hash("/".join(path)))
        return (scale * jax.random.normal(leaf_key, spec.shape)).astype(dtype)

    flat = traverse_util.flatten_dict(param_specs(arch))
    return traverse_util.unflatten_dict({path: init(path, spec) for path, spec in flat.items()})


def _stable_hash(text: str) -> int:
    """FNV-1a over the bytes: `hash` differs between processes."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
