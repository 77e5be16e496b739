"""`attention`: one entry for every implementation of packed causal attention, and the choice between them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from rlx_kernels import dispatch
from rlx_kernels.attention import cudnn, xla
from rlx_kernels.attention.xla import Packing

__all__ = ["attention", "unsupported_reason"]

INT32_MAX = 2**31 - 1


class Implementation(NamedTuple):
    """attention(query, key, value, packing), unsupported_reason(query, key, value, packing), on checked arguments."""

    name: str
    attention: Callable[..., jax.Array]
    unsupported_reason: Callable[..., str | None]


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("cudnn", cudnn.attention, cudnn.unsupported_reason),
    Implementation("xla", xla.attention, xla.unsupported_reason),
)


def attention(
    query: Float[Array, "rows tokens heads width"],
    key: Float[Array, "rows tokens kv_heads width"],
    value: Float[Array, "rows tokens kv_heads width"],
    *,
    positions: Integer[Array, "rows tokens"],
    segment_ids: Integer[Array, "rows tokens"],
    prefix_ids: Integer[Array, "rows tokens"] | None = None,
    window: int | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows tokens heads width"]:
    """Softmax attention with scores q·k / sqrt(width), several sequences packed in a row.

    Token t sees token s of its row iff segment_ids[s] is segment_ids[t] or prefix_ids[t], positions[s] <= positions[t],
    and, with a window (an int), positions[t] - positions[s] < window. Segment ids of 0 and below are padding, which is
    never seen, whatever it holds, NaN too; its outputs and gradients are 0. prefix_ids name the segment whose tokens
    come before this token's own, shared by several segments; 0 where there is none. Positions and ids are of any
    integer type, with values that fit int32. heads is a multiple of kv_heads, head h reads kv head
    h // (heads / kv_heads). Tokens may lie in any order. Products accumulate in float32, and of float32 they are exact
    to float32 on every backend; the softmax is float32. Differentiable in query, key and value, once.

    `max_segments` is a promise that lets "cudnn" serve: the segments of a row are contiguous, at most that many, and
    positions count up from 0 in each. "cudnn" makes a row that breaks it NaN; "xla" does not read it.

    `implementation` is "xla" (exact, any backend, memory linear in the tokens), "cudnn", or None: the first that can.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.

    Source: grouped-query attention, arXiv 2305.13245; the backward pass from the log-sum-exp, arXiv 2205.14135.
    """
    packing = Packing(positions, segment_ids, prefix_ids, window, max_segments)
    check_arguments(query, key, value, packing)
    packing = _in_int32(packing)
    tried = IMPLEMENTATIONS if implementation is None else [dispatch.find(IMPLEMENTATIONS, implementation)]
    serving = dispatch.resolve("attention", tried, lambda i: i.unsupported_reason(query, key, value, packing))
    valid = (packing.segment_ids > 0)[:, :, None, None]
    # a weight of 0 does not remove a NaN or infinity; masking the output masks its cotangent
    masked = (jnp.where(valid, x, 0) for x in (query, key, value))
    return jnp.where(valid, serving.attention(*masked, packing), 0)


def unsupported_reason(
    implementation: str,
    query: Float[Array, "rows tokens heads width"],
    key: Float[Array, "rows tokens kv_heads width"],
    value: Float[Array, "rows tokens kv_heads width"],
    *,
    positions: Integer[Array, "rows tokens"],
    segment_ids: Integer[Array, "rows tokens"],
    prefix_ids: Integer[Array, "rows tokens"] | None = None,
    window: int | None = None,
    max_segments: int | None = None,
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can.

    Raises:
      ValueError: an unknown name, or arguments that `attention` refuses whatever the implementation.
    """
    packing = Packing(positions, segment_ids, prefix_ids, window, max_segments)
    check_arguments(query, key, value, packing)
    return dispatch.find(IMPLEMENTATIONS, implementation).unsupported_reason(query, key, value, _in_int32(packing))


def _in_int32(packing: Packing) -> Packing:
    """Distances of positions are signed, and those of a narrow type would wrap."""
    return packing._replace(
        positions=jnp.asarray(packing.positions, jnp.int32),
        segment_ids=jnp.asarray(packing.segment_ids, jnp.int32),
        prefix_ids=None if packing.prefix_ids is None else jnp.asarray(packing.prefix_ids, jnp.int32),
    )


def check_arguments(query, key, value, packing):
    if query.ndim != 4 or key.shape != value.shape or key.ndim != 4 or 0 in (*query.shape, *key.shape):
        raise ValueError(
            f"query {query.shape} must be [rows, T, H, D], key {key.shape} and value {value.shape} [rows, T, K, D] of "
            "one shape, none of them 0"
        )
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} must agree in rows, tokens and width, and the {query.shape[2]} "
            f"heads must be a multiple of the {key.shape[2]} kv heads"
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: all must be float32 or all bfloat16"
        )
    for name in ("positions", "segment_ids", "prefix_ids"):
        ids = getattr(packing, name)
        if ids is not None and (ids.shape != query.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
            raise ValueError(f"{name} {ids.dtype}{list(ids.shape)} must be integers {list(query.shape[:2])}")
    for name in ("window", "max_segments"):
        bound = getattr(packing, name)
        if bound is not None and not (isinstance(bound, int) and 1 <= bound <= INT32_MAX):
            raise ValueError(f"{name}={bound!r} must be an int from 1 to {INT32_MAX}, or None for no limit")
