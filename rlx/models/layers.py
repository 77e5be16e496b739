"""The layers that dense decoders share: norm, rotary positions, linear with an optional adapter, packed attention.

Norms, rotary angles and softmax run in float32 whatever the weights' dtype; results are cast back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

# What the update keeps for its backward pass under remat = "products"; see `models.transformer.forward`.
KEPT = "matrix product"


def wide(x: Array) -> Array:
    """In float32 or, where the model is float64, in that."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*batch d"]:
    """RMSNorm (arXiv 1910.07467) as Qwen casts it: normalise in float32, cast, then multiply by the weight."""
    wider = wide(x)
    normed = wider * jax.lax.rsqrt(jnp.mean(wider * wider, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope(
    x: Float[Array, "*batch heads d"], positions: Int[Array, "*batch"], theta: float
) -> Float[Array, "*batch heads d"]:
    """Rotary position embedding (arXiv 2104.09864), half-split: dimension i rotates with i + d/2."""
    return rotate(x, *rotary_tables(positions, x.shape[-1], theta))


def rotary_tables(
    positions: Int[Array, "*batch"], dim: int, theta: float
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """(sin, cos) of the angles of `rope`: the same for all heads and layers."""
    half, dtype = dim // 2, jnp.result_type(float)
    angles = positions.astype(dtype)[..., None] * theta ** (-jnp.arange(half, dtype=dtype) / half)
    return jnp.sin(angles), jnp.cos(angles)


@jax.custom_vjp
def rotate(
    x: Float[Array, "*batch heads d"], sin: Float[Array, "*batch half"], cos: Float[Array, "*batch half"]
) -> Float[Array, "*batch heads d"]:
    """`rope` with its tables given."""
    first, second = jnp.split(wide(x), 2, axis=-1)
    sin, cos = sin[..., None, :], cos[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# A rotation's transpose is the rotation back, in one pass; autodiff would pad and add halves.
rotate.defvjp(
    lambda x, sin, cos: (rotate(x, sin, cos), (sin, cos)),
    lambda tables, d_out: (rotate(d_out, -tables[0], tables[1]), None, None),
)


def linear(
    x: Float[Array, "*batch i"],
    layer: dict[str, Array],
    adapter: dict[str, Array] | None = None,
    adapter_scale: float = 1.0,
) -> Float[Array, "*batch o"]:
    """x W + bias, plus (x A) B * scale where there is a LoRA adapter (arXiv 2106.09685)."""
    # Flat: with two batch axes XLA lays both factors of the weight's gradient out anew, at the cost of the product.
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ layer["kernel"]
    if "bias" in layer:
        y = y + layer["bias"]
    if adapter is not None:
        # The adapter may be kept in a wider dtype than the frozen weights.
        low_rank = checkpoint_name(flat.astype(adapter["a"].dtype) @ adapter["a"], KEPT)
        y = y + (adapter_scale * (low_rank @ adapter["b"])).astype(y.dtype)
    return checkpoint_name(y, KEPT).reshape(*x.shape[:-1], y.shape[-1])


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


def packed_causal_mask(
    positions: Int[Array, "rows t"], segment_ids: Int[Array, "rows t"], prefix_ids: Int[Array, "rows t"] | None = None
) -> Bool[Array, "rows t t"]:
    """Token t sees token s of its own segment, or of its prefix's, at an earlier or equal position.

    A prefix is the beginning that several segments of a row share, a segment of its own; 0 = none. Segment 0 is
    padding: it sees nothing and is not seen.
    """
    seen = segment_ids[:, None, :]
    own = seen == segment_ids[:, :, None]
    if prefix_ids is not None:
        own |= seen == prefix_ids[:, :, None]
    earlier = positions[:, None, :] <= positions[:, :, None]
    return own & earlier & (seen > 0) & (segment_ids > 0)[:, :, None]
