"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next, Qwen3.5 and OLMo hybrids have it: one decay a head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx.models import recurrent
from rlx.models.cache import LayerCache
from rlx.models.description import Architecture, DeltaNet, Params, ParamSpec
from rlx.models.layers import wide
from rlx.models.recurrent import Heads, Projected, States
from rlx.models.rows import Rows, Token
from rlx.models.weights import Weights, linear_spec, project

AXES = ()  # nothing that is cached grows


def heads_of(mixer: DeltaNet) -> Heads:
    return Heads(mixer.key_heads, mixer.key_dim, mixer.value_heads, mixer.value_dim)


def specs(mixer: DeltaNet, arch: Architecture) -> Params:
    keys, values, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim, mixer.value_heads
    widths = {
        "fused": {
            "in_proj_qkv": (2 * keys + values, "recurrent_qkv"),
            "in_proj_z": (values, "recurrent_value"),
            "in_proj_b": (heads, "recurrent_heads"),
            "in_proj_a": (heads, "recurrent_heads"),
        },
        "grouped": {
            "in_proj_qkvz": (2 * keys + 2 * values, "recurrent_qkvz"),
            "in_proj_ba": (2 * heads, "recurrent_gates"),
        },
        "apart": {
            "q_proj": (keys, "recurrent_key"),
            "k_proj": (keys, "recurrent_key"),
            "v_proj": (values, "recurrent_value"),
            "a_proj": (heads, "recurrent_heads"),
            "b_proj": (heads, "recurrent_heads"),
            "g_proj": (values, "recurrent_value"),
        },
    }[mixer.form]
    parts = {"in_proj_qkv": (("in_proj_q", keys), ("in_proj_k", keys), ("in_proj_v", values))}
    projections = {
        name: linear_spec(arch.hidden_size, width, ("embed", axis), parts=parts.get(name, ()))
        for name, (width, axis) in widths.items()
    }
    return projections | {
        "conv1d": ParamSpec((2 * keys + values, mixer.conv_width), ("recurrent_qkv", "tap"), "normal"),
        "A_log": ParamSpec((heads,), ("recurrent_heads",), "zeros"),
        "dt_bias": ParamSpec((heads,), ("recurrent_heads",), "ones"),
        "norm": ParamSpec((mixer.value_dim,), ("recurrent_value_dim",), "ones"),
        "out_proj": linear_spec(values, arch.hidden_size, ("recurrent_value", "embed")),
    }


def forward(
    mixer: DeltaNet, arch: Architecture, weights: Weights, x: Float[Array, "rows t d"], rows: Rows
) -> tuple[Float[Array, "rows t d"], States | None]:
    """Returns also the states after each row's last token, where one device has the row."""
    given, gate = _projected(mixer, weights, x)
    out, states = recurrent.over_rows(heads_of(mixer), weights.params["conv1d"], given, rows)
    return _output(mixer, weights, out, gate), states


def empty(mixer: DeltaNet, rows: int, ends: tuple[int, ...], dtype: jnp.dtype) -> LayerCache:
    return LayerCache((), tuple(recurrent.empty(heads_of(mixer), mixer.conv_width, rows)))


def keep(mixer: DeltaNet, made: States) -> LayerCache:
    return LayerCache((), tuple(made))


def step(
    mixer: DeltaNet, arch: Architecture, weights: Weights, x: Float[Array, "rows 1 d"], held: LayerCache, token: Token
) -> tuple[Float[Array, "rows 1 d"], LayerCache]:
    """One token a row, from the states before it."""
    given, gate = _projected(mixer, weights, x)
    out, states = recurrent.over_token(heads_of(mixer), weights.params["conv1d"], given, States(*held.state))
    return _output(mixer, weights, out, gate), LayerCache((), tuple(states))


def _projected(mixer: DeltaNet, weights: Weights, x: Array) -> tuple[Projected, Array]:
    """(what the rule reads, the output's gate [rows, t, value_heads value_dim])."""
    names = {"fused": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "apart": ("g_proj", "b_proj", "a_proj")}
    if mixer.form == "grouped":
        qkv, gate, b, a = _ungrouped(mixer, project(weights, "in_proj_qkvz", x), project(weights, "in_proj_ba", x))
    elif mixer.form == "apart":
        qkv = jnp.concatenate([project(weights, name, x) for name in ("q_proj", "k_proj", "v_proj")], axis=-1)
        gate, b, a = (project(weights, name, x) for name in names["apart"])
    else:
        qkv, gate, b, a = (project(weights, name, x) for name in names["fused"])
    beta = jax.nn.sigmoid(wide(b)) * (2 if mixer.negative_eigenvalues else 1)
    rate = jnp.exp(wide(weights.params["A_log"]))
    decay = -rate * jax.nn.softplus(wide(a) + wide(weights.params["dt_bias"]))
    return Projected(qkv, decay, beta), gate


def _ungrouped(mixer: DeltaNet, qkvz: Array, ba: Array) -> tuple[Array, Array, Array, Array]:
    """(qkv, gate, b, a) where a key head's query, key, values and gates lie side by side."""
    each = mixer.value_heads // mixer.key_heads
    values = each * mixer.value_dim
    by_head = qkvz.reshape(*qkvz.shape[:-1], mixer.key_heads, -1)
    flat = lambda part: part.reshape(*part.shape[:-2], -1)  # noqa: E731
    cuts = (mixer.key_dim, 2 * mixer.key_dim, 2 * mixer.key_dim + values)
    query, key, value, gate = (flat(part) for part in jnp.split(by_head, cuts, axis=-1))
    b, a = (flat(part) for part in jnp.split(ba.reshape(*ba.shape[:-1], mixer.key_heads, -1), 2, axis=-1))
    return jnp.concatenate([query, key, value], axis=-1), gate, b, a


def _output(mixer: DeltaNet, weights: Weights, out: Array, gate: Array) -> Array:
    normed = recurrent.gated_norm(out, weights.params["norm"], gate, mixer.eps, jax.nn.silu)
    return project(weights, "out_proj", normed)
