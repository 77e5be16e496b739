"""In which precision the head's matrix products multiply. They add up in float32, those of float64 in float64."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Precision = Literal["bfloat16", "bfloat16_3x", "tensorfloat32", "float32", "float64"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def resolve(precision: Precision | None, hidden: jax.Array, head: jax.Array) -> Precision:
    """What the dtypes say where nothing is asked for: bfloat16 if both are, float64 if one is, else float32."""
    if precision is not None:
        return precision
    if jnp.float64 in (hidden.dtype, head.dtype):
        return "float64"
    return "bfloat16" if hidden.dtype == head.dtype == jnp.bfloat16 else "float32"


def product(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], a_axis: int, b_axis: int, precision: Precision
) -> Float[Array, "_ _"]:
    """a and b contracted over one axis of each, in `sum_dtype`.

    bfloat16 rounds the operands. bfloat16_3x splits each into a bfloat16 and a bfloat16 remainder and leaves out the
    product of remainders (Henry, Tang, Heinecke, arXiv 1904.06376): 16 bits of mantissa at the matrix units' rate
    divided by 3, or by less where an operand is bfloat16 already. tensorfloat32 rounds to 10 bits, on NVIDIA GPUs only.
    """
    if precision == "bfloat16":
        return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), a_axis, b_axis)
    if precision == "bfloat16_3x":
        (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
        pairs = [(a_high, b_high), (a_high, b_low), (a_low, b_high)]
        # the small terms first: they would be lost one by one against the large one
        terms = [_dot(x, y, a_axis, b_axis) for x, y in reversed(pairs) if x is not None and y is not None]
        return sum(terms[1:], terms[0])
    if precision == "float64":
        return _dot(a.astype(jnp.float64), b.astype(jnp.float64), a_axis, b_axis, lax.Precision.HIGHEST)
    exact = lax.DotAlgorithmPreset.TF32_TF32_F32 if precision == "tensorfloat32" else lax.Precision.HIGHEST
    return _dot(a.astype(jnp.float32), b.astype(jnp.float32), a_axis, b_axis, exact)


def operand_dtype(precision: Precision) -> jnp.dtype:
    """Of an array that is only ever multiplied."""
    return jnp.dtype(jnp.bfloat16) if precision == "bfloat16" else sum_dtype(precision)


def sum_dtype(precision: Precision) -> jnp.dtype:
    """Of logits, statistics and sums over tokens or the vocabulary."""
    return jnp.dtype(jnp.float64 if precision == "float64" else jnp.float32)


def _dot(a, b, a_axis, b_axis, precision=None):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=wide)


def _split(x):
    """(x in bfloat16, the remainder in bfloat16 or None where there is none)"""
    high = x.astype(jnp.bfloat16)
    if x.dtype == jnp.bfloat16:
        return high, None
    # A compiler may take x - float32(bfloat16(x)) for 0; reduce_precision says that the rounding is meant.
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16), (x - rounded).astype(jnp.bfloat16)
