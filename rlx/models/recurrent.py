"""What the layers of the gated delta rule share: convolution, rule and gated norm, over packed rows or one token.

Both states, of the convolution and of the rule, are float32 whatever the model's dtype: they are sums over all that a
sequence has said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from rlx_kernels.delta_rule import causal_convolution, causal_convolution_step, delta_rule, delta_rule_step

from rlx.models.layers import wide
from rlx.models.rows import Rows
from rlx.models.sharded_recurrence import sharded_convolution, sharded_delta_rule


class Projected(NamedTuple):
    """What a layer makes of its tokens before they see each other; leading axes rows, t."""

    qkv: Array  # [channels], queries, keys and values of all heads, one after the other
    decay: Array  # [heads] or [heads, key_dim], the log, float32
    beta: Array  # [heads], float32


class Heads(NamedTuple):
    """How the channels of `Projected.qkv` are heads."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class States(NamedTuple):
    """After the last token; float32."""

    conv: Array  # [rows, conv_width - 1, channels]
    rule: Array  # [rows, value_heads, key_dim, value_dim]


def empty(heads: Heads, conv_width: int, rows: int) -> States:
    conv = jnp.zeros((rows, conv_width - 1, heads.channels), jnp.float32)
    return States(conv, jnp.zeros((rows, heads.value_heads, heads.key_dim, heads.value_dim), jnp.float32))


def over_rows(
    heads: Heads, conv: Float[Array, "channels width"], given: Projected, rows: Rows
) -> tuple[Float[Array, "rows t heads value_dim"], States | None]:
    """Packed rows, each segment from empty states. The output is float32. Where devices share the work no states are
    returned: nothing goes on from there."""
    segment_ids, placement = rows.segment_ids, rows.placement
    if placement is not None:
        mixed = sharded_convolution(placement, given.qkv, conv, segment_ids)
        return sharded_delta_rule(placement, *_heads(heads, mixed), given.decay, given.beta, segment_ids), None
    mixed, conv_state = causal_convolution(given.qkv, conv, segment_ids=segment_ids)
    out, state = delta_rule(*_heads(heads, mixed), given.decay, given.beta, segment_ids=segment_ids)
    return out, States(conv_state.astype(jnp.float32), state)


def over_token(
    heads: Heads, conv: Float[Array, "channels width"], given: Projected, states: States
) -> tuple[Float[Array, "rows 1 heads value_dim"], States]:
    """One more token a row."""
    mixed, conv_state = causal_convolution_step(given.qkv[:, 0], conv, states.conv)
    out, state = delta_rule_step(*_heads(heads, mixed), given.decay[:, 0], given.beta[:, 0], states.rule)
    return out[:, None], States(conv_state, state)


def gated_norm(
    out: Float[Array, "rows t heads value_dim"],
    weight: Float[Array, " value_dim"],
    gate: Float[Array, "rows t channels"],
    eps: float,
    activation: Callable[[Array], Array],
) -> Float[Array, "rows t channels"]:
    """RMSNorm of each head, times the activated gate; in float32, returned in the gate's dtype."""
    normed = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps) * wide(weight)
    return (normed.reshape(gate.shape) * activation(wide(gate))).astype(gate.dtype)


def _heads(heads: Heads, mixed: Float[Array, "*batch channels"]) -> tuple[Array, Array, Array]:
    """(queries, keys, values) of each head: activated, keys of length 1, queries of length 1 / √key_dim."""
    active = jax.nn.silu(wide(mixed))
    keys = heads.key_heads * heads.key_dim
    query, key, value = jnp.split(active, (keys, 2 * keys), axis=-1)
    query, key = (x.reshape(*x.shape[:-1], heads.key_heads, heads.key_dim) for x in (query, key))
    value = value.reshape(*value.shape[:-1], heads.value_heads, heads.value_dim)
    return _unit(query) * heads.key_dim**-0.5, _unit(key), value


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
