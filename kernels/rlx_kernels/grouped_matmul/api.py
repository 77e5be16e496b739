"""`grouped_matmul`: one entry for every implementation, and the choice between them."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from rlx_kernels import dispatch
from rlx_kernels.grouped_matmul import xla

__all__ = ["grouped_matmul", "unsupported_reason"]


class Implementation(NamedTuple):
    """grouped_matmul(x, weights, group_sizes), unsupported_reason(x, weights), and where None may choose it."""

    name: str
    automatic: tuple[str, ...]  # platforms
    grouped_matmul: Callable[..., jax.Array]
    unsupported_reason: Callable[..., str | None]


def grouped_matmul(
    x: Float[Array, "rows width"],
    weights: Float[Array, "groups width out"],
    group_sizes: Integer[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """Rows of x times the matrix of their group: the first group_sizes[0] with weights[0], the next with weights[1] ...

    Groups may be empty. Rows after the last group give zeros and get zero gradients. Sums accumulate in float32, or in
    float64 where the inputs are, and are returned in x's dtype, and products of float32 are exact to float32 on every
    backend; differentiable (reverse mode, once) in `x` and `weights`. Sizes are traced, so none is refused: rows beyond
    T are ignored, negative sizes count as 0. What rows of no group and their cotangents hold, NaN too, does not matter.

    `implementation` is "xla" (blocks of rows, exact, on any backend), "tokamax" (kernels for GPU and TPU), "ragged_dot"
    (`jax.lax.ragged_dot`: native on a TPU; elsewhere XLA makes it a masked product of all rows for each group),
    or None: the first of tokamax, ragged_dot, xla that is made for this platform and can serve.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.

    Source: the grouped product of dropless mixtures of experts, MegaBlocks, arXiv 2211.15841.
    """
    check_arguments(x, weights, group_sizes)
    platform = jax.default_backend()
    automatic = [i for i in IMPLEMENTATIONS if platform in i.automatic]
    tried = automatic if implementation is None else [dispatch.find(IMPLEMENTATIONS, implementation)]
    serving = dispatch.resolve("grouped_matmul", tried, lambda i: i.unsupported_reason(x, weights))
    return serving.grouped_matmul(x, weights, xla.bounded(group_sizes, x.shape[0]))


def unsupported_reason(
    implementation: str,
    x: Float[Array, "rows width"],
    weights: Float[Array, "groups width out"],
    group_sizes: Integer[Array, " groups"],
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can.

    Raises:
      ValueError: an unknown name, or arguments that `grouped_matmul` refuses whatever the implementation.
    """
    check_arguments(x, weights, group_sizes)
    return dispatch.find(IMPLEMENTATIONS, implementation).unsupported_reason(x, weights)


def tokamax_grouped_matmul(x, weights, group_sizes):
    """tokamax's kernel, never its fallback to a dense product."""
    import tokamax  # an optional dependency

    out = tokamax.ragged_dot(x, weights, group_sizes, preferred_element_type=x.dtype, implementation="mosaic")
    # what it leaves in rows of no group is not defined
    return jnp.where(jnp.arange(x.shape[0])[:, None] < group_sizes.sum(), out, 0)


def tokamax_unsupported_reason(x, weights) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "the package tokamax is not installed: pip install tokamax"
    platform = jax.default_backend()
    if platform not in ("gpu", "tpu"):
        return f"needs a GPU or a TPU; the default backend is {platform}"
    if x.dtype != jnp.bfloat16:
        return f"its kernels take bfloat16, not {x.dtype}: cast x and weights, or use 'xla'"
    return None


def ragged_dot(x, weights, group_sizes):
    own = jnp.arange(x.shape[0])[:, None] < group_sizes.sum()
    out = lax.ragged_dot(
        jnp.where(own, x, 0),
        weights,
        group_sizes,
        precision=xla.precision(x.dtype),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return jnp.where(own, out.astype(x.dtype), 0)  # and, backwards, the cotangent


def _serves_everything(x, weights) -> None:
    return None


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("tokamax", ("gpu",), tokamax_grouped_matmul, tokamax_unsupported_reason),
    Implementation("ragged_dot", ("tpu",), ragged_dot, _serves_everything),
    Implementation("xla", ("cpu", "gpu", "tpu"), xla.grouped_matmul, _serves_everything),
)


def check_arguments(x, weights, group_sizes):
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1] or 0 in (*x.shape, *weights.shape):
        raise ValueError(
            f"x {x.shape} and weights {weights.shape} must be [T, D] and [E, D, F] of the same D, none of them 0"
        )
    if x.dtype != weights.dtype or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise ValueError(
            f"x is {x.dtype} and weights {weights.dtype}; both must be float32, both bfloat16 or, for checks, both "
            "float64: cast one"
        )
    if group_sizes.shape != weights.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes {group_sizes.dtype}{list(group_sizes.shape)} must be integers [E] with E = {weights.shape[0]}"
        )
