"""Arrays of a mesh, whole, for what is not on the mesh: an engine in this process, files, other programs."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rlx.parallel.mesh import Placement

STACKED = 3  # axes of an array of matrices


def piece(x: Any, part: tuple[Any, ...]) -> Any:
    """`x[part]`, `part` beginning with numbers. No device of a mesh gets more of `x` than that."""
    numbers = tuple(np.array([n], np.int32) for n in part if not isinstance(n, slice))
    if not numbers or not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
        return x[part]
    return _taken(x, numbers)[part[len(numbers) :]]


# A slice, or one that begins at a traced number, would bring a whole shard, or all of them, to every device first.
def _gathered(x: Array, numbers: tuple[Any, ...]) -> Array:
    return x[numbers][0]


_taken = jax.jit(_gathered)


class Gather:
    """Whole arrays on this process's first device, on its host, or nowhere: the process only helps others.

    One array after the other; what several processes hold goes by its first axis, that of layers, so that a device
    holds at most one layer of one array more than it did. All of them must gather the same, in the same order.

    Args:
      lasting: arrays of the mesh that stay what they are; they are gathered when they are asked for first, and kept.
    """

    def __init__(self, placement: Placement, lasting: PyTree[Array], to: Literal["device", "host", "nowhere"]):
        everywhere = NamedSharding(placement.mesh, PartitionSpec())
        self._everywhere = jax.jit(lambda x: x, out_shardings=everywhere)
        self._layer = jax.jit(_gathered, out_shardings=everywhere)
        self._to = to
        self._lasting = {id(x): x for x in jax.tree.leaves(lasting)}
        self._kept: dict[int, Array | np.ndarray] = {}

    def __call__(self, tree: PyTree[Array]) -> PyTree[Array | np.ndarray]:
        return jax.tree.map(self._one, tree)

    def _one(self, x: Array) -> Array | np.ndarray:
        if id(x) in self._kept:
            return self._kept[id(x)]
        whole = self._whole(x)
        if id(x) in self._lasting:
            self._kept[id(x)] = whole
        return whole

    def _whole(self, x: Array) -> Array | np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return self._here(x)
        if x.ndim < STACKED:
            return self._here(self._everywhere(x))
        layers = [self._here(self._layer(x, (np.array([i], np.int32),))) for i in range(len(x))]
        if self._to == "nowhere":
            return layers[0]
        return np.stack(layers) if self._to == "host" else jnp.stack(layers)

    def _here(self, x: Array) -> Array | np.ndarray:
        if self._to == "nowhere":
            x.block_until_ready()
            return np.zeros(0)
        if not x.is_fully_addressable:
            x = x.addressable_data(0)
        return np.asarray(x) if self._to == "host" else jax.device_put(x, jax.local_devices()[0])
