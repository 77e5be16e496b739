"""The layers that dense decoders share: norm, rotary positions, linear with an optional adapter, packed attention.

Norms, rotary angles and softmax run in float32 whatever the weights' dtype; results are cast back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rms_norm(x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*batch d"]:
    """RMSNorm (arXiv 1910.07467) as Qwen casts it: normalise in float32, cast, then multiply by the weight."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope(
    x: Float[Array, "*batch heads d"], positions: Int[Array, "*batch"], theta: float
) -> Float[Array, "*batch heads d"]:
    """Rotary position embedding (arXiv 2104.09864), half-split: dimension i rotates with i + d/2."""
    half = x.shape[-1] // 2
    inverse_frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * inverse_frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def linear(
    x: Float[Array, "*batch i"],
    layer: dict[str, Array],
    adapter: dict[str, Array] | None = None,
    adapter_scale: float = 1.0,
) -> Float[Array, "*batch o"]:
    """x W + bias, plus (x A) B * scale where there is a LoRA adapter (arXiv 2106.09685)."""
    y = x @ layer["kernel"]
    if "bias" in layer:
        y = y + layer["bias"]
    if adapter is not None:
        # The adapter may be kept in a wider dtype than the frozen weights.
        low_rank = x.astype(adapter["a"].dtype) @ adapter["a"]
        y = y + (adapter_scale * (low_rank @ adapter["b"])).astype(y.dtype)
    return y


def attention(
    query: Float[Array, "rows q heads d"],
    key: Float[Array, "rows s kv_heads d"],
    value: Float[Array, "rows s kv_heads d"],
    allowed: Bool[Array, "rows q s"],
) -> Float[Array, "rows q heads d"]:
    """Grouped-query softmax attention over the keys that `allowed` admits. A query that may see none gets zeros."""
    rows, length, heads, dim = query.shape
    groups = heads // key.shape[2]
    grouped = query.reshape(rows, length, key.shape[2], groups, dim)
    scores = jnp.einsum("rqkgd,rskd->rkgqs", grouped, key, preferred_element_type=jnp.float32) * dim**-0.5
    scores = jnp.where(allowed[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(allowed[:, None, None], jax.nn.softmax(scores, axis=-1), 0).astype(value.dtype)
    return jnp.einsum("rkgqs,rskd->rqkgd", weights, value).reshape(rows, length, heads, dim)


def packed_causal_mask(positions: Int[Array, "rows t"], segment_ids: Int[Array, "rows t"]) -> Bool[Array, "rows t t"]:
    """Token t sees token s of its own segment at an earlier or equal position. Segment 0 is padding, sees nothing."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    earlier = positions[:, None, :] <= positions[:, :, None]
    return same & earlier & (segment_ids > 0)[:, :, None]
