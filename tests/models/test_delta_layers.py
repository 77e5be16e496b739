"""Layers of the gated delta rule against numpy: their projections, gates and norms, and one token after a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models import delta, kda
from rlx.models.description import Architecture, DeltaNet, Group, KimiDelta, Layer, Mlp
from rlx.models.rows import packed_rows, token_rows
from rlx.models.weights import Weights

WIDTH, TOKENS = 12, 7
NETS = {
    "fused": DeltaNet(2, 4, 3, 2, 4, "fused", negative_eigenvalues=False, eps=1e-6),
    "grouped": DeltaNet(2, 4, 3, 2, 4, "grouped", negative_eigenvalues=False, eps=1e-6),
    "apart": DeltaNet(2, 2, 3, 5, 4, "apart", negative_eigenvalues=True, eps=1e-5),
}
KIMIS = {
    "low rank": KimiDelta(2, 4, 4, full_rank_gate=False, lower_bound=None, decay_slots=2, eps=1e-5),
    "bounded": KimiDelta(2, 4, 4, full_rank_gate=True, lower_bound=-5.0, decay_slots=4, eps=1e-5),
}
MODULES = dict.fromkeys(NETS, delta) | dict.fromkeys(KIMIS, kda)
FAST = ("grouped", "bounded")
every_layer = pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODULES]
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer(name):
    """(module, mixer, architecture, float32 weights, tokens)."""
    mixer = (NETS | KIMIS)[name]
    arch = Architecture("test", 10, WIDTH, (Group((Layer(mixer, Mlp(4)),), 1),), "cast_first", 1e-6, False, 100)
    rng = np.random.default_rng(0)
    specs = MODULES[name].specs(mixer, arch)
    draw = lambda spec: jnp.asarray(rng.normal(size=spec.shape) * 0.6, jnp.float32)  # noqa: E731
    params = jax.tree.map(draw, specs, is_leaf=lambda x: hasattr(x, "initializer"))
    return MODULES[name], mixer, arch, params, jnp.asarray(rng.normal(size=(1, TOKENS, WIDTH)), jnp.float32)


def projections(name, mixer, p, x):
    """(q, k, v, output gate, beta, log decay [T, heads or heads, d]) before the convolution, in float64."""
    w = {n: np.asarray(v["kernel"] if isinstance(v, dict) else v, np.float64) for n, v in p.items()}
    if name in KIMIS:
        f = (x @ w["f_a_proj"] @ w["f_b_proj"] + w["dt_bias"]).reshape(TOKENS, 2, 4)
        rate = np.exp(w["A_log"][:2])[:, None]
        decay = -rate * np.log1p(np.exp(f)) if name == "low rank" else -5 * sigmoid(rate * f)
        gate = x @ w["g_proj"] if name == "bounded" else x @ w["g_a_proj"] @ w["g_b_proj"]
        return [x @ w[n] for n in ("q_proj", "k_proj", "v_proj")], gate, sigmoid(x @ w["b_proj"]), decay
    if name == "apart":
        qkv, gate = [x @ w[n] for n in ("q_proj", "k_proj", "v_proj")], x @ w["g_proj"]
        b, a = x @ w["b_proj"], x @ w["a_proj"]
    elif name == "fused":
        qkv, gate = np.split(x @ w["in_proj_qkv"], [6, 12], axis=1), x @ w["in_proj_z"]
        b, a = x @ w["in_proj_b"], x @ w["in_proj_a"]
    else:  # of each key head: q 3, k 3, v of two value heads 2 · 2, z 2 · 2; b 2, a 2
        heads, gates = (x @ w["in_proj_qkvz"]).reshape(TOKENS, 2, 14), (x @ w["in_proj_ba"]).reshape(TOKENS, 2, 4)
        cut = lambda y, start, end: y[:, :, start:end].reshape(TOKENS, -1)  # noqa: E731
        qkv, gate = [cut(heads, 0, 3), cut(heads, 3, 6), cut(heads, 6, 10)], cut(heads, 10, 14)
        b, a = cut(gates, 0, 2), cut(gates, 2, 4)
    beta = sigmoid(b) * (2 if mixer.negative_eigenvalues else 1)
    return qkv, gate, beta, -np.exp(w["A_log"]) * np.log1p(np.exp(a + w["dt_bias"]))


def by_hand(name, mixer, p, x):
    """The layer, token by token and head by head, in float64."""
    x = np.asarray(x[0], np.float64)
    (q, k, v), gate, beta, decay = projections(name, mixer, p, x)
    conv = np.asarray(p["conv1d"], np.float64)
    padded = np.concatenate([np.zeros((3, len(conv))), np.concatenate([q, k, v], axis=1)])
    mixed = np.stack([(padded[t : t + 4] * conv.T).sum(0) for t in range(TOKENS)])
    mixed = mixed * sigmoid(mixed)
    h = kda.heads_of(mixer) if name in KIMIS else delta.heads_of(mixer)
    keys = h.key_heads * h.key_dim
    q, k = (mixed[:, i * keys : (i + 1) * keys].reshape(TOKENS, h.key_heads, h.key_dim) for i in range(2))
    v = mixed[:, 2 * keys :].reshape(TOKENS, h.value_heads, h.value_dim)
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    norm, weight = ("o_norm", "o_proj") if name in KIMIS else ("norm", "out_proj")
    active = sigmoid(gate) if name in KIMIS else gate * sigmoid(gate)
    out = np.zeros((TOKENS, h.value_heads, h.value_dim))
    for head in range(h.value_heads):
        state, of = np.zeros((h.key_dim, h.value_dim)), head * h.key_heads // h.value_heads
        for t in range(TOKENS):
            state = state * np.exp(np.broadcast_to(decay[t, head], h.key_dim))[:, None]
            state = state + np.outer(k[t, of], beta[t, head] * (v[t, head] - state.T @ k[t, of]))
            out[t, head] = state.T @ q[t, of] / np.sqrt(h.key_dim)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + mixer.eps) * np.asarray(p[norm], np.float64)
    return (out.reshape(TOKENS, -1) * active) @ np.asarray(p[weight]["kernel"], np.float64)


@every_layer
def test_the_layer_is_the_one_by_hand_and_one_token_after_it_too(name):
    module, mixer, arch, params, x = layer(name)
    wanted = by_hand(name, mixer, params, x)
    weights, positions = Weights(params, {}, 1.0), jnp.arange(TOKENS)[None]
    forward = jax.jit(functools.partial(module.forward, mixer, arch))
    step = jax.jit(functools.partial(module.step, mixer, arch))
    y, _ = forward(weights, x, packed_rows(arch, positions, jnp.ones_like(positions)))
    np.testing.assert_allclose(y[0], wanted, atol=2e-5 * np.abs(wanted).max())
    _, made = forward(weights, x, packed_rows(arch, positions, (positions < TOKENS - 2).astype(jnp.int32)))
    held = module.keep(mixer, made)
    empty = module.empty(mixer, 1, (16,), jnp.bfloat16)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), held) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), empty
    )
    for t in (TOKENS - 2, TOKENS - 1):
        y, held = step(weights, x[:, t : t + 1], held, token_rows(arch, jnp.array([t])))
        np.testing.assert_allclose(y[0, 0], wanted[t], atol=2e-5 * np.abs(wanted).max())
