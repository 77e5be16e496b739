"""The one mesh, and what is said of arrays on it.

Axis types are Auto: XLA's partitioner carries shardings from parameters and batches through the program, so that the
model's code knows no layout; only pipelines and expert exchange are written by hand (`pipeline`, `expert`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rlx.parallel.layout import AXES, Layout, LayoutError


def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh ('pp', 'dp', 'cp', 'tp') of the first devices.

    Raises:
      LayoutError: where there are fewer devices than the layout needs.
    """
    found = jax.devices() if devices is None else devices
    if len(found) < layout.devices:
        raise LayoutError(f"{layout} needs {layout.devices} devices and {len(found)} are visible")
    shape = tuple(layout.size(axis) for axis in AXES)
    grid = np.asarray(found[: layout.devices]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a program runs. Static under jit.

    Attributes:
      micro_batches: parts that the rows of one call are cut into for the pipeline; 1 where there is none.
      expert_capacity: rows that a device may send to each other one, of all that it could (tokens x top k); 1 drops
        none.
    """

    mesh: Mesh
    layout: Layout
    micro_batches: int = 1
    expert_capacity: float = 1.0

    def rows(self, x: Array) -> Array:
        """`x` [rows, tokens, ...] with rows over dp and tokens over cp."""
        spec = PartitionSpec("dp", "cp", *(None,) * (x.ndim - 2))
        return jax.lax.with_sharding_constraint(x, spec if self.inside else NamedSharding(self.mesh, spec))

    @property
    def inside(self) -> bool:
        """Is this part of the program inside of a `jax.shard_map`, which has a mesh of its own: the same, some of its
        axes manual?"""
        return not jax.sharding.get_abstract_mesh().empty
