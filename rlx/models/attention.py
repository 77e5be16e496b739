"""Grouped-query attention: with norms of queries and keys, partial or no rotary positions, a window, an output gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx.models import cache, rope
from rlx.models.cache import LayerCache
from rlx.models.description import Architecture, Attention, Params, ParamSpec
from rlx.models.rows import Rows, Token
from rlx.models.sharded_attention import row_attention
from rlx.models.weights import Weights, linear_spec, norm_spec, normalise, project

AXES = (3, 2)  # of the positions, in cached keys and values


def specs(mixer: Attention, arch: Architecture) -> Params:
    hidden, query = arch.hidden_size, mixer.heads * mixer.head_dim
    key = mixer.kv_heads * mixer.head_dim
    tree: Params = {
        "q_proj": linear_spec(hidden, query * (1 + mixer.gated), ("embed", "heads"), bias=mixer.bias),
        "k_proj": linear_spec(hidden, key, ("embed", "kv_heads"), bias=mixer.bias),
        "v_proj": linear_spec(hidden, key, ("embed", "kv_heads"), bias=mixer.bias),
        "o_proj": linear_spec(query, hidden, ("heads", "embed")),
    }
    if mixer.norm == "head":
        tree |= {name: norm_spec(arch.norm, mixer.head_dim, "head_dim") for name in ("q_norm", "k_norm")}
    if mixer.norm == "width":
        tree["q_norm"] = ParamSpec((query,), ("heads",), "ones")
        tree["k_norm"] = ParamSpec((key,), ("kv_heads",), "ones")
    return tree


def forward(
    mixer: Attention, arch: Architecture, weights: Weights, x: Float[Array, "rows t d"], rows: Rows
) -> tuple[Float[Array, "rows t d"], tuple[Array, Array]]:
    """Returns also the keys and values, [rows, t, kv_heads, head_dim]."""
    query, key, value, gate = _projected(mixer, arch, weights, x, rows.tables)
    mixed = row_attention(rows, arch.windows.index(mixer.window), query, key, value)
    return _output(weights, mixed, gate), (key, value)


def empty(mixer: Attention, rows: int, ends: tuple[int, ...], dtype: jnp.dtype) -> LayerCache:
    shape = rows, ends, mixer.kv_heads, mixer.head_dim, dtype
    return LayerCache((cache.empty_keys(*shape), cache.empty_values(*shape)), ())


def keep(mixer: Attention, made: tuple[Array, Array]) -> LayerCache:
    """What the cache holds of `forward`'s keys and values."""
    return LayerCache((cache.as_keys(made[0]), cache.as_values(made[1])), ())


def step(
    mixer: Attention, arch: Architecture, weights: Weights, x: Float[Array, "rows 1 d"], held: LayerCache, token: Token
) -> tuple[Float[Array, "rows 1 d"], LayerCache]:
    """One token a row over what the cache holds before it."""
    query, key, value, gate = _projected(mixer, arch, weights, x, token.tables)
    keys, values = held.growing
    mixed, keys, values = cache.attend(
        query[:, 0], key[:, 0], value[:, 0], keys, values, token.positions, window=mixer.window
    )
    return _output(weights, mixed[:, None], gate), LayerCache((keys, values), ())


def _projected(
    mixer: Attention, arch: Architecture, weights: Weights, x: Array, tables: tuple[rope.Tables, ...]
) -> tuple[Array, Array, Array, Array | None]:
    """(query, key, value, gate), [rows, t, heads, head_dim]."""

    def heads(y: Array, name: str) -> Array:
        """Normed, where there are norms, and apart."""
        if mixer.norm == "width":
            y = normalise(arch.norm, y, weights.params[name], arch.rms_norm_eps)
        y = y.reshape(*y.shape[:2], -1, mixer.head_dim)
        return normalise(arch.norm, y, weights.params[name], arch.rms_norm_eps) if mixer.norm == "head" else y

    query, gate = project(weights, "q_proj", x), None
    if mixer.gated:  # a head's query and its gate lie side by side
        both = query.reshape(*query.shape[:2], mixer.heads, 2, mixer.head_dim)
        query, gate = (both[..., i, :].reshape(*query.shape[:2], -1) for i in range(2))
    query, key = heads(query, "q_norm"), heads(project(weights, "k_proj", x), "k_norm")
    value = project(weights, "v_proj", x).reshape(*key.shape)
    if mixer.rope is not None:
        sin_cos = tables[arch.ropes.index(mixer.rope)]
        query, key = rope.apply(mixer.rope, query, sin_cos), rope.apply(mixer.rope, key, sin_cos)
    return query, key, value, gate


def _output(weights: Weights, mixed: Array, gate: Array | None) -> Array:
    flat = mixed.reshape(*mixed.shape[:2], -1)
    return project(weights, "o_proj", flat if gate is None else flat * jax.nn.sigmoid(gate))
