"""The weights of a layer on their way through it: parameters, the adapter beside them, and linear layers of both."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from rlx.models.description import NormKind, Params, ParamSpec
from rlx.models.layers import KEPT, rms_norm, wide


@struct.dataclass
class Weights:
    """A subtree of a layer's parameters with the same subtree of its LoRA adapter, where it has one."""

    params: Params
    adapter: Params
    scale: float  # alpha / rank
    # Products see tokens as one axis; on a mesh rows and tokens are cut each, and as one they cannot be.
    flat: bool = struct.field(pytree_node=False, default=True)

    def sub(self, name: str) -> Weights:
        return dataclasses.replace(self, params=self.params[name], adapter=self.adapter.get(name, {}))


def project(weights: Weights, name: str, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
    """x W + bias of the linear layer `name`, plus (x A) B * scale where it has an adapter (arXiv 2106.09685).

    A kernel that holds several projections side by side has an adapter for each: {part: {"a", "b"}} in their order.
    """
    layer, adapter = weights.params[name], weights.adapter.get(name)
    # Flat: with two batch axes XLA lays both factors of the weight's gradient out anew, at the cost of the product.
    flat = x.reshape(-1, x.shape[-1]) if weights.flat else x
    y = flat @ layer["kernel"]
    if "bias" in layer:
        y = y + layer["bias"]
    if adapter is not None:
        y = y + (weights.scale * _low_rank(flat, adapter)).astype(y.dtype)
    return checkpoint_name(y, KEPT).reshape(*x.shape[:-1], y.shape[-1])


def _low_rank(x: Array, adapter: Params) -> Array:
    if "a" not in adapter:
        return jnp.concatenate([_low_rank(x, part) for part in adapter.values()], axis=-1)
    # The adapter may be kept in a wider dtype than the frozen weights.
    return checkpoint_name(x.astype(adapter["a"].dtype) @ adapter["a"], KEPT) @ adapter["b"]


def linear_spec(
    inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool = False, parts: tuple[tuple[str, int], ...] = ()
) -> dict[str, ParamSpec]:
    """A linear layer; kernels are [in, out]."""
    specs = {"kernel": ParamSpec((inputs, outputs), axes, "normal", parts)}
    if bias:
        specs["bias"] = ParamSpec((outputs,), axes[1:], "zeros")
    return specs


def norm_spec(kind: NormKind, size: int, axis: str) -> ParamSpec:
    """The weight of a norm that leaves a normalised vector as it is."""
    return ParamSpec((size,), (axis,), "zeros" if kind == "zero_centred" else "ones")


def normalise(kind: NormKind, x: Float[Array, "*batch d"], weight: Float[Array, " d"], eps: float) -> Array:
    """RMSNorm (arXiv 1910.07467) as `kind` casts it: `models.description.NormKind`."""
    if kind == "cast_first":
        return rms_norm(x, weight, eps)
    gain = 1 + wide(weight) if kind == "zero_centred" else wide(weight)
    return rms_norm(wide(x), gain, eps).astype(x.dtype)
