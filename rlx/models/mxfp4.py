"""MXFP4 weights (OCP Microscaling Formats 1.0): 4-bit floats in blocks of 32 that share a power of two."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, UInt8

BLOCK = 32
BIAS = 127  # of the scales' exponents
# E2M1 by code: a sign bit, two of exponent, one of mantissa.
VALUES = np.array([s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


def stored_names(name: str) -> tuple[str, str]:
    """Of the packed values and of the scales of what would be `name` plainly stored."""
    return f"{name}_packed", f"{name}_scale"


def plain_names(found: Iterable[str]) -> set[str]:
    """Tensor names as if nothing were packed: NAME for NAME_packed beside NAME_scale."""
    names = set(found)
    packed = {name.removesuffix("_packed") for name in names if name.endswith(".weight_packed")}
    whole = {name for name in packed if set(stored_names(name)) <= names}
    return names - {stored for name in whole for stored in stored_names(name)} | whole


def dequantise(
    packed: UInt8[np.ndarray, "*rows half"], scale: UInt8[np.ndarray, "*rows blocks"]
) -> Float[np.ndarray, "*rows columns"]:
    """float32 of two values a byte, the even column in the low nibble, times 2^(scale - 127) of their block.

    Exact in float32 and bfloat16, but for the ends of their range.

    Raises:
      ValueError: shapes that do not fit, other types than uint8, a scale of 255 (not a number).
    """
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"packed is {packed.dtype} and scale {scale.dtype}: both must be uint8")
    columns = 2 * packed.shape[-1]
    if columns % BLOCK or scale.shape != (*packed.shape[:-1], columns // BLOCK):
        raise ValueError(
            f"packed {packed.shape} holds {columns} columns, which takes scales "
            f"{(*packed.shape[:-1], columns / BLOCK)}, one for each {BLOCK}; they are {scale.shape}"
        )
    if (scale == 255).any():
        raise ValueError("a scale is 255, which stands for not-a-number: the checkpoint is damaged")
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    blocks = VALUES[codes].reshape(*scale.shape, BLOCK)
    return np.ldexp(blocks, scale[..., None].astype(np.int32) - BIAS).reshape(*packed.shape[:-1], columns)
