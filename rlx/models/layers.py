"""What all layers share: the norm, rotation, who sees whom.

Norms, rotary angles and softmax run in float32 whatever the weights' dtype; results are cast back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
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


@jax.custom_vjp
def rotate(
    x: Float[Array, "*batch heads d"], sin: Float[Array, "*batch half"], cos: Float[Array, "*batch half"]
) -> Float[Array, "*batch heads d"]:
    """Rotary positions, half-split (arXiv 2104.09864): dimension i turns with i + d/2, by angles of these sines."""
    first, second = jnp.split(wide(x), 2, axis=-1)
    sin, cos = sin[..., None, :], cos[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# A rotation's transpose is the rotation back, in one pass; autodiff would pad and add halves.
rotate.defvjp(
    lambda x, sin, cos: (rotate(x, sin, cos), (sin, cos)),
    lambda tables, d_out: (rotate(d_out, -tables[0], tables[1]), None, None),
)


class Ids(NamedTuple):
    """What decides who sees whom among packed tokens: int32 [rows, t] each."""

    positions: Array  # of each token in its own sequence, its prefix included
    segments: Array  # 0 = padding
    prefixes: Array  # the segment that holds the beginning of this one's sequence, 0 = none


def visible(queries: Ids, keys: Ids, window: int | None) -> Bool[Array, "rows t s"]:
    """Token t sees token s of its own segment, or of its prefix's, at an earlier or equal position, less than `window`
    before its own where there is one.

    A prefix is the beginning that several segments of a row share, a segment of its own; 0 = none. Segment 0 is
    padding: it sees nothing and is not seen.
    """
    seen = keys.segments[:, None, :]
    own = (seen == queries.segments[:, :, None]) | (seen == queries.prefixes[:, :, None])
    distance = queries.positions[:, :, None] - keys.positions[:, None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return own & near & (seen > 0) & (queries.segments > 0)[:, :, None]


def packed_causal_mask(
    positions: Int[Array, "rows t"], segment_ids: Int[Array, "rows t"], prefix_ids: Int[Array, "rows t"] | None = None
) -> Bool[Array, "rows t t"]:
    """`visible` of whole rows, without a window."""
    ids = Ids(positions, segment_ids, segment_ids if prefix_ids is None else prefix_ids)
    return visible(ids, ids, None)
