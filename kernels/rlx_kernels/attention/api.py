"""`attention`: one entry for every implementation of packed causal attention, and the choice between them."""

import difflib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx_kernels.attention import cudnn, xla
from rlx_kernels.attention.xla import Packing

__all__ = ["attention", "unsupported_reason"]


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
    positions: Int[Array, "rows tokens"],
    segment_ids: Int[Array, "rows tokens"],
    prefix_ids: Int[Array, "rows tokens"] | None = None,
    window: int | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows tokens heads width"]:
    """Softmax attention with scores q·k / sqrt(width), several sequences packed in a row.

    Token t sees token s of its row iff segment_ids[s] is segment_ids[t] or prefix_ids[t], positions[s] <= positions[t],
    and, with a window, positions[t] - positions[s] < window. Segment 0 is padding: it is never seen and its outputs and
    gradients are 0. prefix_ids name the segment whose tokens come before this token's own, shared by several segments;
    0 where there is none. heads is a multiple of kv_heads, head h reads kv head h // (heads / kv_heads). Tokens may lie
    in any order. Products accumulate in float32, the softmax is float32. Differentiable in query, key and value, once.

    `max_segments` is a promise that lets "cudnn" serve: the segments of a row are contiguous, at most that many, and
    positions count up from 0 in each. A row that breaks it comes out as NaN.

    `implementation` is "xla" (exact, any backend, memory linear in the tokens), "cudnn", or None: the first that can.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.

    Source: grouped-query attention, arXiv 2305.13245; the backward pass from the log-sum-exp, arXiv 2205.14135.
    """
    packing = Packing(positions, segment_ids, prefix_ids, window, max_segments)
    check_arguments(query, key, value, packing)
    return _resolve(implementation, query, key, value, packing).attention(query, key, value, packing)


def unsupported_reason(
    implementation: str,
    query: Float[Array, "rows tokens heads width"],
    key: Float[Array, "rows tokens kv_heads width"],
    value: Float[Array, "rows tokens kv_heads width"],
    *,
    positions: Int[Array, "rows tokens"],
    segment_ids: Int[Array, "rows tokens"],
    prefix_ids: Int[Array, "rows tokens"] | None = None,
    window: int | None = None,
    max_segments: int | None = None,
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can. ValueError for an unknown name."""
    packing = Packing(positions, segment_ids, prefix_ids, window, max_segments)
    return _find(implementation).unsupported_reason(query, key, value, packing)


def _resolve(name, query, key, value, packing) -> Implementation:
    reasons = []
    for implementation in [_find(name)] if name is not None else IMPLEMENTATIONS:
        reason = implementation.unsupported_reason(query, key, value, packing)
        if reason is None:
            return implementation
        reasons.append(f"{implementation.name}: {reason}")
    raise ValueError("attention cannot be served here by " + "; ".join(reasons))


def _find(name: str) -> Implementation:
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    names = [i.name for i in IMPLEMENTATIONS]
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(f"implementation={name!r} is unknown; nearest: {nearest!r}, all: {', '.join(names)}, or None")


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
        if bound is not None and bound < 1:
            raise ValueError(f"{name}={bound} must be at least 1, or None for no limit")
