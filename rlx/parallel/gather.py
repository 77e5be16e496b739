"""Arrays of a mesh, whole, for what is not on the mesh: an engine in this process, files, other programs."""

from __future__ import annotations

from typing import Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rlx.parallel.mesh import Placement


class Gather:
    """Whole arrays on this process's first device, on its host, or nowhere: the process only helps others.

    One array after the other, so that a device holds at most one more than it did. With several processes each must
    gather the same, in the same order.

    Args:
      lasting: arrays of the mesh that stay what they are; they are gathered when they are asked for first, and kept.
    """

    def __init__(self, placement: Placement, lasting: PyTree[Array], to: Literal["device", "host", "nowhere"]):
        self._everywhere = NamedSharding(placement.mesh, PartitionSpec())
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
        if not x.is_fully_addressable and not x.is_fully_replicated:
            x = jax.jit(lambda x: x, out_shardings=self._everywhere)(x)
        if self._to == "nowhere":
            x.block_until_ready()
            return np.zeros(0)
        if not x.is_fully_addressable:
            x = x.addressable_data(0)
        return np.asarray(x) if self._to == "host" else jax.device_put(x, jax.local_devices()[0])
