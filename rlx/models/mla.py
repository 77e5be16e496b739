"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent.

The cache holds the latent and the key that all heads share, not keys and values; decoding folds the matrices that
expand it into the query and the output (section 2.1.2 of the paper).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx.models import cache, rope
from rlx.models.cache import LayerCache
from rlx.models.description import Architecture, LatentAttention, Params, ParamSpec
from rlx.models.layers import rms_norm
from rlx.models.rows import Rows, Token
from rlx.models.sharded_attention import row_attention
from rlx.models.weights import Weights, linear_spec, project

LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's own
AXES = (1,)  # of the positions, in cached latents


def specs(mixer: LatentAttention, arch: Architecture) -> Params:
    hidden, heads = arch.hidden_size, mixer.heads
    query, value = heads * (mixer.nope_dim + mixer.rope_dim), heads * mixer.value_dim
    expanded = heads * (mixer.nope_dim + mixer.value_dim)
    tree: Params = {
        "kv_a_proj_with_mqa": linear_spec(hidden, mixer.kv_rank + mixer.rope_dim, ("embed", "latent_key")),
        "kv_a_layernorm": ParamSpec((mixer.kv_rank,), ("latent",), "ones"),
        "kv_b_proj": linear_spec(mixer.kv_rank, expanded, ("latent", "heads_key_value")),
        "o_proj": linear_spec(value, hidden, ("heads_value", "embed")),
    }
    if mixer.query_rank is None:
        tree["q_proj"] = linear_spec(hidden, query, ("embed", "heads"))
    else:
        tree["q_a_proj"] = linear_spec(hidden, mixer.query_rank, ("embed", "query_latent"))
        tree["q_a_layernorm"] = ParamSpec((mixer.query_rank,), ("query_latent",), "ones")
        tree["q_b_proj"] = linear_spec(mixer.query_rank, query, ("query_latent", "heads"))
    if mixer.gated:
        tree["g_proj"] = linear_spec(hidden, value, ("embed", "heads_value"))
    return tree


def forward(
    mixer: LatentAttention, arch: Architecture, weights: Weights, x: Float[Array, "rows t d"], rows: Rows
) -> tuple[Float[Array, "rows t d"], Float[Array, "rows t c"]]:
    """Returns also what is cached of every token: its latent and its shared key."""
    query = _query(mixer, arch, weights, x, rows.tables)
    latent, shared = _latent(mixer, arch, weights, x, rows.tables)
    expanded = _heads(project(weights, "kv_b_proj", latent), mixer.heads)
    shared_by_all = jnp.broadcast_to(shared[:, :, None], (*expanded.shape[:3], mixer.rope_dim))
    key = jnp.concatenate([expanded[..., : mixer.nope_dim], shared_by_all], axis=-1)
    query = query * (mixer.scale * query.shape[-1] ** 0.5)  # attention divides by that root
    mixed = row_attention(rows, arch.windows.index(None), query, key, expanded[..., mixer.nope_dim :])
    return _output(mixer, weights, x, mixed), jnp.concatenate([latent, shared], axis=-1)


def empty(mixer: LatentAttention, rows: int, ends: tuple[int, ...], dtype: jnp.dtype) -> LayerCache:
    width = mixer.kv_rank + mixer.rope_dim
    return LayerCache((tuple(jnp.zeros((rows, size, width), dtype) for size in cache.sizes(ends)),), ())


def keep(mixer: LatentAttention, made: Array) -> LayerCache:
    return LayerCache((made,), ())


def step(
    mixer: LatentAttention,
    arch: Architecture,
    weights: Weights,
    x: Float[Array, "rows 1 d"],
    held: LayerCache,
    token: Token,
) -> tuple[Float[Array, "rows 1 d"], LayerCache]:
    """One token a row over the latents that the cache holds before it."""
    query = _query(mixer, arch, weights, x, token.tables)[:, 0] * mixer.scale
    made = jnp.concatenate(_latent(mixer, arch, weights, x, token.tables), axis=-1)[:, 0]
    expand = weights.params["kv_b_proj"]["kernel"].reshape(mixer.kv_rank, mixer.heads, -1)
    folded = jnp.einsum("rhn,chn->rhc", query[..., : mixer.nope_dim], expand[..., : mixer.nope_dim])
    query = jnp.concatenate([folded, query[..., mixer.nope_dim :]], axis=-1)
    latents, stretches = cache.attend_latents(query, made, held.growing[0], token.positions)
    mixed = jnp.einsum("rhc,chv->rhv", latents[..., : mixer.kv_rank], expand[..., mixer.nope_dim :])
    return _output(mixer, weights, x, mixed[:, None]), LayerCache((stretches,), ())


def _query(
    mixer: LatentAttention, arch: Architecture, weights: Weights, x: Array, tables: tuple[rope.Tables, ...]
) -> Array:
    """[rows, t, heads, nope_dim + rope_dim]"""
    if mixer.query_rank is None:
        query = project(weights, "q_proj", x)
    else:
        low = rms_norm(project(weights, "q_a_proj", x), weights.params["q_a_layernorm"], LATENT_EPS)
        query = project(weights, "q_b_proj", low)
    query = _heads(query, mixer.heads)
    if mixer.rope is None:
        return query
    turned = rope.apply(mixer.rope, query[..., mixer.nope_dim :], tables[arch.ropes.index(mixer.rope)])
    return jnp.concatenate([query[..., : mixer.nope_dim], turned], axis=-1)


def _latent(
    mixer: LatentAttention, arch: Architecture, weights: Weights, x: Array, tables: tuple[rope.Tables, ...]
) -> tuple[Array, Array]:
    """(latent [rows, t, kv_rank], normed; the key that heads share [rows, t, rope_dim], rotated)."""
    both = project(weights, "kv_a_proj_with_mqa", x)
    latent = rms_norm(both[..., : mixer.kv_rank], weights.params["kv_a_layernorm"], LATENT_EPS)
    shared = both[..., mixer.kv_rank :]
    if mixer.rope is not None:
        shared = rope.apply(mixer.rope, shared[:, :, None], tables[arch.ropes.index(mixer.rope)])[:, :, 0]
    return latent, shared


def _output(mixer: LatentAttention, weights: Weights, x: Array, mixed: Array) -> Array:
    flat = mixed.reshape(*mixed.shape[:2], -1)
    if mixer.gated:
        flat = flat * jax.nn.sigmoid(project(weights, "g_proj", x))
    return project(weights, "o_proj", flat)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, -1)
