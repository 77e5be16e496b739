"""LoRA adapters (arXiv 2106.09685) as trees beside the parameters: W + (alpha / rank) A B with W frozen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlx.config.schema import LoraConfig
from rlx.models.spec import LINEAR_NAMES, Architecture, Params, linear_shape


def adapter_scale(config: LoraConfig) -> float:
    return config.alpha / config.rank if config.rank else 1.0


def init_adapter(arch: Architecture, config: LoraConfig, key: jax.Array) -> Params:
    """{target: {"a": [L, in, rank], "b": [L, rank, out]}}, float32. B is zero: the first forward is the base model's.

    A is uniform in ±1/sqrt(in), Kaiming's bound with a = sqrt(5), as PEFT initialises it.
    """
    adapter: Params = {}
    for name in config.targets:
        inputs, outputs = linear_shape(arch, name)
        shape = (arch.num_layers, inputs, config.rank)
        bound = inputs**-0.5
        leaf_key = jax.random.fold_in(key, LINEAR_NAMES.index(name))
        adapter[name] = {
            "a": jax.random.uniform(leaf_key, shape, jnp.float32, -bound, bound),
            "b": jnp.zeros((arch.num_layers, config.rank, outputs), jnp.float32),
        }
    return adapter


def merge(params: Params, adapter: Params, scale: float) -> Params:
    """Parameters with the adapter added into the kernels, for engines and exports. Shares what it does not change."""
    layers = dict(params["layers"])
    for name, low_rank in adapter.items():
        kernel = layers[name]["kernel"]
        delta = scale * jnp.einsum("lir,lro->lio", low_rank["a"], low_rank["b"])
        layers[name] = {**layers[name], "kernel": (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)}
    return {**params, "layers": layers}
