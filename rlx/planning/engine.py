"""What engines hold: keys, values and recurrent states of the sequences that they write."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlx.config.schema import Config, LoraConfig
from rlx.models.description import Architecture
from rlx.models.kinds import kind
from rlx.models.lora import targets
from rlx.models.spec import count_parameters


class Cache(NamedTuple):
    """Bytes, over all devices of an engine."""

    token: int  # of keys and values
    sequence: int  # of states that do not grow


# A search asks for the same model with many settings.
@functools.lru_cache(maxsize=64)
def cache(arch: Architecture, dtype: str) -> Cache:
    token = sequence = 0
    for layer in arch.layers:
        made = jax.eval_shape(lambda m=layer.mixer: kind(m).empty(m, 1, (1,), jnp.dtype(dtype)))
        token += _bytes(made.growing)
        sequence += _bytes(made.state)
    return Cache(token, sequence)


def embedded(config: Config, arch: Architecture) -> tuple[int, int]:
    """(cache, served weights that are no one else's) of the engine in the trainer's process, bytes on its device."""
    if config.engine.kind != "local" or config.cluster.inference_nodes:
        return 0, 0
    each, itemsize = cache(arch, config.model.dtype), jnp.dtype(config.model.dtype).itemsize
    held = config.engine.slots * (each.sequence + each.token * config.engine.context)
    # Merged kernels stand beside the frozen ones; without an adapter all parameters are cast anew.
    return held, _served(arch, config.lora) * itemsize


@functools.lru_cache(maxsize=64)
def _served(arch: Architecture, lora: LoraConfig) -> int:
    if not lora.rank:
        return count_parameters(arch)
    return sum(len(linear.slot.numbers) * math.prod(linear.spec.shape) for linear in targets(arch, lora))


def _bytes(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
