"""The update's loss once more, plainly: each sequence alone, all logits, float64, formulas as they are written down.

    loss = Σ_t w_t [ -A f(p_y/q_y) log p_y + A Σ_{v in H} (q_v f(p_v/q_v) - α p_v) log p_v - η H(p) ]

with f(r) = min(r, C), α = ρ f(1/ρ), ρ = (1 - Σ_H q) / (1 - Σ_H p); f, p and α outside of log p are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx.data.packing import Trajectory
from rlx.models.spec import Architecture


class Rows(NamedTuple):
    """A sequence a row, padded at its end; per-token values at the token's own index."""

    tokens: jax.Array  # [B, S]
    mask: jax.Array
    advantages: jax.Array  # [B, 1]
    sampler: jax.Array  # [B, S]
    head_ids: jax.Array  # [B, S, K]
    head_sampler: jax.Array


def rows(trajectories: Sequence[Trajectory], length: int) -> Rows:
    """Call inside `jax.enable_x64`."""
    count, k = len(trajectories), 0 if trajectories[0].head is None else trajectories[0].head.ids.shape[1]
    tokens, mask = np.zeros((count, length), int), np.zeros((count, length), bool)
    sampler, head_ids = np.zeros((count, length)), np.zeros((count, length, k), int)
    head_sampler = np.full((count, length, k), -10.0)
    for i, t in enumerate(trajectories):
        span = slice(len(t.tokens))
        tokens[i, span], mask[i, span], sampler[i, span] = t.tokens, t.mask, t.logprobs
        if t.head is not None:
            head_ids[i, span][t.mask], head_sampler[i, span][t.mask] = t.head.ids, t.head.logprobs
    advantages = np.array([[t.advantage] for t in trajectories])
    return Rows(*map(jnp.asarray, (tokens, mask, advantages, sampler, head_ids, head_sampler)))


def norm(x, weight, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x, theta):
    """Rotary positions: pairs (i, i + d/2) as complex numbers."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([z.real, z.imag], -1)


def log_softmax(arch: Architecture, params, tokens, temperature):
    """log p(. | tokens before) at every index of [B, S]; the first predicts from nothing and is not to be used."""
    count, length = tokens.shape
    x = params["embed"][tokens]
    seen = jnp.tril(jnp.ones((length, length), bool))
    attention = arch.layers[0].mixer
    for i in range(arch.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]["0"])
        mixer, mlp = layer["mixer"], layer["mlp"]
        y = norm(x, layer["mixer_norm"], arch.rms_norm_eps)
        q, k, v = (
            (y @ mixer[name]["kernel"]).reshape(count, length, -1, attention.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q = turned(norm(q, mixer["q_norm"], arch.rms_norm_eps), attention.rope.theta)
        k = turned(norm(k, mixer["k_norm"], arch.rms_norm_eps), attention.rope.theta)
        k, v = (jnp.repeat(z, attention.heads // attention.kv_heads, axis=2) for z in (k, v))
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / np.sqrt(attention.head_dim)
        mixed = jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)
        x = x + mixed.reshape(count, length, -1) @ mixer["o_proj"]["kernel"]
        y = norm(x, layer["mlp_norm"], arch.rms_norm_eps)
        gate, up = y @ mlp["gate_proj"]["kernel"], y @ mlp["up_proj"]["kernel"]
        x = x + (gate * jax.nn.sigmoid(gate) * up) @ mlp["down_proj"]["kernel"]
    logits = norm(x, params["final_norm"], arch.rms_norm_eps) @ params["embed"].T / temperature
    return jnp.roll(jax.nn.log_softmax(logits), 1, axis=1)


def with_adapter(params, adapter, scale):
    """W + scale · A B."""
    layer = {part: dict(tree) if isinstance(tree, dict) else tree for part, tree in params["layers"]["0"].items()}
    for part, tree in adapter["0"].items():
        for name, low_rank in tree.items():
            layer[part][name] = {"kernel": layer[part][name]["kernel"] + scale * low_rank["a"] @ low_rank["b"]}
    return {**params, "layers": {"0": layer}}


def token_losses(logp, rows: Rows, cap: float, entropy_coefficient: float):
    """[B, S]. `cap` None: plain REINFORCE, f = 1 and nothing is centred."""
    constant = jax.lax.stop_gradient
    own = jnp.take_along_axis(logp, rows.tokens[..., None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    if cap is None:
        return -rows.advantages * own - entropy_coefficient * entropy
    weight = lambda ratio: jnp.minimum(ratio, cap)  # noqa: E731
    log_p = jnp.take_along_axis(logp, rows.head_ids, -1)
    p, q = constant(jnp.exp(log_p)), jnp.exp(rows.head_sampler)
    rho = jnp.maximum(1 - q.sum(-1), 1e-6) / jnp.maximum(1 - p.sum(-1), 1e-6)
    coefficients = q * weight(p / q) - (rho * weight(1 / rho))[..., None] * p
    scored = -weight(constant(jnp.exp(own - rows.sampler))) * own
    return rows.advantages * (scored + (coefficients * log_p).sum(-1)) - entropy_coefficient * entropy


def token_weights(mask, aggregation: str):
    """[B, S], of sequences that have a target."""
    lengths = mask.sum(1, keepdims=True)
    if aggregation == "token_mean":
        return mask / lengths.sum()
    return mask / jnp.maximum(lengths, 1) / (lengths > 0).sum()
