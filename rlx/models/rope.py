"""Rotary positions (arXiv 2104.09864) and their extension by YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlx.models.description import Rope, Yarn
from rlx.models.layers import rotate

Tables = tuple[Array, Array]  # sin and cos, float32 [..., dim / 2]


def inverse_frequencies(rope: Rope) -> Float[np.ndarray, " half"]:
    """Radians a position, of each pair of dimensions; float64."""
    plain = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.yarn is None:
        return plain
    low, high = _turning_points(rope, rope.yarn)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (ramp / rope.yarn.factor + 1 - ramp)


def _turning_points(rope: Rope, yarn: Yarn) -> tuple[int, int]:
    """Pairs below the first are kept as they are, above the second divided by the factor: by how often a pair turns
    within the original context, `beta_fast` and `beta_slow` times."""

    def pair(turns: float) -> float:
        return rope.dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = math.floor(pair(yarn.beta_fast)), math.ceil(pair(yarn.beta_slow))
    return max(low, 0), min(high, rope.dim - 1)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies attention's temperature by, on cos and sin: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def tables(rope: Rope, positions: Int[Array, "*batch"]) -> Tables:
    """(sin, cos) of the angles, the same for all heads and all layers of this kind."""
    dtype = jnp.result_type(float)
    angles = positions.astype(dtype)[..., None] * jnp.asarray(inverse_frequencies(rope), dtype)
    scale = 1.0 if rope.yarn is None else rope.yarn.table_scale
    return jnp.sin(angles) * scale, jnp.cos(angles) * scale


def apply(rope: Rope, x: Float[Array, "*batch heads d"], sin_cos: Tables) -> Float[Array, "*batch heads d"]:
    """`x` with its first `rope.dim` dimensions rotated. Interleaved pairs come out as halves: queries and keys alike,
    so that no score changes."""
    turned, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        turned = jnp.concatenate([turned[..., ::2], turned[..., 1::2]], axis=-1)
    turned = rotate(turned, *sin_cos)
    return turned if rope.dim == x.shape[-1] else jnp.concatenate([turned, rest], axis=-1)
