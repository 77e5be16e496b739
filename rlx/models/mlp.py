"""The gated MLP of a dense layer, and its activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx.models.description import Architecture, Mlp, Params, Situ
from rlx.models.layers import wide
from rlx.models.weights import Weights, linear_spec, project


def specs(mlp: Mlp, arch: Architecture) -> Params:
    return gated_specs(arch.hidden_size, mlp.width, "mlp")


def gated_specs(hidden: int, width: int, axis: str) -> Params:
    return {
        "gate_proj": linear_spec(hidden, width, ("embed", axis)),
        "up_proj": linear_spec(hidden, width, ("embed", axis)),
        "down_proj": linear_spec(width, hidden, (axis, "embed")),
    }


def forward(mlp: Mlp, weights: Weights, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    gate, up = project(weights, "gate_proj", x), project(weights, "up_proj", x)
    return project(weights, "down_proj", activate(mlp.situ, gate, up))


def activate(situ: Situ | None, gate: Float[Array, "*batch w"], up: Float[Array, "*batch w"]) -> Array:
    """silu(gate) * up (arXiv 2002.05202), or `Situ`."""
    if situ is None:
        return jax.nn.silu(gate) * up
    wide_gate, bounded_up = wide(gate), situ.up_bound * jnp.tanh(wide(up) / situ.up_bound)
    bounded_gate = situ.gate_bound * jnp.tanh(wide_gate / situ.gate_bound) * jax.nn.sigmoid(wide_gate)
    return (bounded_gate * bounded_up).astype(gate.dtype)
