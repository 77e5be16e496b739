"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay for each key channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx.models import recurrent
from rlx.models.cache import LayerCache
from rlx.models.description import Architecture, KimiDelta, Params, ParamSpec
from rlx.models.layers import wide
from rlx.models.recurrent import Heads, Projected, States
from rlx.models.rows import Rows, Token
from rlx.models.weights import Weights, linear_spec, project

AXES = ()  # nothing that is cached grows


def heads_of(mixer: KimiDelta) -> Heads:
    return Heads(mixer.heads, mixer.head_dim, mixer.heads, mixer.head_dim)


def specs(mixer: KimiDelta, arch: Architecture) -> Params:
    hidden, low = arch.hidden_size, mixer.head_dim
    width = mixer.heads * mixer.head_dim
    into = lambda inputs, axis: linear_spec(inputs, width, (axis, "recurrent_value"))  # noqa: E731
    gates = (
        {"g_proj": into(hidden, "embed")}
        if mixer.full_rank_gate
        else {"g_a_proj": linear_spec(hidden, low, ("embed", "low_rank")), "g_b_proj": into(low, "low_rank")}
    )
    return gates | {
        "q_proj": into(hidden, "embed"),
        "k_proj": into(hidden, "embed"),
        "v_proj": into(hidden, "embed"),
        "conv1d": ParamSpec((3 * width, mixer.conv_width), ("recurrent_qkv", "tap"), "normal"),
        "f_a_proj": linear_spec(hidden, low, ("embed", "low_rank")),
        "f_b_proj": into(low, "low_rank"),
        "b_proj": linear_spec(hidden, mixer.heads, ("embed", "recurrent_heads")),
        "A_log": ParamSpec((mixer.decay_slots,), ("recurrent_slots",), "zeros"),
        "dt_bias": ParamSpec((width,), ("recurrent_value",), "zeros"),
        "o_norm": ParamSpec((mixer.head_dim,), ("recurrent_value_dim",), "ones"),
        "o_proj": linear_spec(width, hidden, ("recurrent_value", "embed")),
    }


def forward(
    mixer: KimiDelta, arch: Architecture, weights: Weights, x: Float[Array, "rows t d"], rows: Rows
) -> tuple[Float[Array, "rows t d"], States | None]:
    """Returns also the states after each row's last token, where one device has the row."""
    given = _projected(mixer, weights, x)
    out, states = recurrent.over_rows(heads_of(mixer), weights.params["conv1d"], given, rows)
    return _output(mixer, weights, x, out), states


def empty(mixer: KimiDelta, rows: int, ends: tuple[int, ...], dtype: jnp.dtype) -> LayerCache:
    return LayerCache((), tuple(recurrent.empty(heads_of(mixer), mixer.conv_width, rows)))


def keep(mixer: KimiDelta, made: States) -> LayerCache:
    return LayerCache((), tuple(made))


def step(
    mixer: KimiDelta, arch: Architecture, weights: Weights, x: Float[Array, "rows 1 d"], held: LayerCache, token: Token
) -> tuple[Float[Array, "rows 1 d"], LayerCache]:
    """One token a row, from the states before it."""
    given = _projected(mixer, weights, x)
    out, states = recurrent.over_token(heads_of(mixer), weights.params["conv1d"], given, States(*held.state))
    return _output(mixer, weights, x, out), LayerCache((), tuple(states))


def log_decay(
    mixer: KimiDelta,
    a_log: Float[Array, " slots"],
    dt_bias: Float[Array, " width"],
    f: Float[Array, "*batch width"],
) -> Float[Array, "*batch heads head_dim"]:
    """-e^A softplus(f + dt) of Kimi Linear or, with a lower bound, lower_bound sigmoid(e^A (f + dt)) of Kimi K3: a
    function of its own, not the first one cut off. Float32."""
    shifted = (wide(f) + wide(dt_bias)).reshape(*f.shape[:-1], mixer.heads, mixer.head_dim)
    rate = jnp.exp(wide(a_log[: mixer.heads]))[:, None]
    if mixer.lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return mixer.lower_bound * jax.nn.sigmoid(rate * shifted)


def _projected(mixer: KimiDelta, weights: Weights, x: Array) -> Projected:
    qkv = jnp.concatenate([project(weights, name, x) for name in ("q_proj", "k_proj", "v_proj")], axis=-1)
    f = project(weights, "f_b_proj", project(weights, "f_a_proj", x))
    decay = log_decay(mixer, weights.params["A_log"], weights.params["dt_bias"], f)
    return Projected(qkv, decay, jax.nn.sigmoid(wide(project(weights, "b_proj", x))))


def _output(mixer: KimiDelta, weights: Weights, x: Array, out: Array) -> Array:
    if mixer.full_rank_gate:
        gate = project(weights, "g_proj", x)
    else:
        gate = project(weights, "g_b_proj", project(weights, "g_a_proj", x))
    normed = recurrent.gated_norm(out, weights.params["o_norm"], gate, mixer.eps, jax.nn.sigmoid)
    return project(weights, "o_proj", normed)
