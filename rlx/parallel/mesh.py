"""The one mesh, and what is said of arrays on it.

Axis types are Auto: XLA's partitioner carries shardings from parameters and batches through the program, so that the
model's code knows no layout. What it would do badly is written by hand: pipelines (`pipeline`), the exchange of experts
(`expert`), attention and recurrences (`rlx.models.sharded_attention`, `sharded_recurrence`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rlx.parallel.layout import AXES, Layout, LayoutError


def make_mesh(layout: Layout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh ('pp', 'dp', 'cp', 'tp') of the first devices.

    Raises:
      LayoutError: where there are fewer devices than the layout needs.
    """
    found = jax.devices() if devices is None else devices
    if len(found) < layout.devices:
        on_cpu = found[0].platform == "cpu"
        way_out = f"; JAX_NUM_CPU_DEVICES={layout.devices} makes as many virtual ones of a CPU" if on_cpu else ""
        raise LayoutError(f"{layout} needs {layout.devices} devices and {len(found)} are visible{way_out}")
    shape = tuple(layout.size(axis) for axis in AXES)
    grid = np.asarray(found[: layout.devices]).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclasses.dataclass(frozen=True)
class Partitions:
    """A tree of PartitionSpecs that is hashable, so that a program can be compiled for it."""

    leaves: tuple[PartitionSpec, ...]
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, tree: PyTree[PartitionSpec]) -> Partitions:
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return cls(tuple(leaves), structure)

    @property
    def tree(self) -> PyTree[PartitionSpec]:
        return jax.tree.unflatten(self.structure, self.leaves)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a program runs. Static under jit.

    Attributes:
      micro_batches: parts that the rows of one call are cut into for the pipeline; 1 where there is none.
      expert_capacity: rows that a device may send to each other one, of all that it could (tokens x top k); 1 drops
        none.
      rounds: blocks of layers that each stage of the pipeline holds; above 1 its schedule is circular.
      ring: attention passes keys and values round over cp in place of gathering them.
      trained: where the trained parameters lie; their gradients are added up there, each device its own part. None
        leaves that to the compiler.
      sequence_parallel: between products the tokens of a row are cut over tp too (`rlx.parallel.sequence`).
    """

    mesh: Mesh
    layout: Layout
    micro_batches: int = 1
    expert_capacity: float = 1.0
    rounds: int = 1
    ring: bool = False
    trained: Partitions | None = None
    sequence_parallel: bool = False

    def rows(self, x: Array) -> Array:
        """`x` [rows, tokens, ...] with rows over dp and tokens over cp."""
        return self.lying("dp", "cp")(x)

    @property
    def over_tp(self) -> bool:
        return self.sequence_parallel and self.layout.tp > 1

    def stream(self, x: Array) -> Array:
        """`x` [..., rows, tokens, d] as it lies between a layer's products: tokens over cp, and over tp where they are
        cut so."""
        return self.lying(*(None,) * (x.ndim - 3), "dp", ("cp", "tp") if self.over_tp else "cp")(x)

    def lying(self, *axes: str | tuple[str, ...] | None) -> Callable[[Array], Array]:
        """A constraint on an array of a layer: which axes of the mesh cut its dimensions, those that follow whole."""
        mesh = jax.sharding.get_abstract_mesh() if self.inside else self.mesh
        return partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, PartitionSpec(*axes)))

    def spread(self, x: np.ndarray, first: int = 0, rows: int | None = None) -> Array:
        """`x` [rows, ...] onto the mesh: rows over dp. A number goes to every device.

        first, rows: x holds the rows from `first` on of so many, those of this process's devices (`rows_of`) at least.
        """
        if not x.ndim:
            where = NamedSharding(self.mesh, PartitionSpec())
            return jax.make_array_from_callback(x.shape, where, lambda index: x[index])
        shape = (len(x) if rows is None else rows, *x.shape[1:])

        def own(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # only for a sharding without devices
            start, stop, _ = index[0].indices(shape[0])
            return x[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, PartitionSpec("dp")), own)

    def rows_of(self, process: int, rows: int) -> tuple[int, int]:
        """First and last + 1 of `rows` that devices of a process hold, with what lies between."""
        lying: Mapping[Any, Any] = NamedSharding(self.mesh, PartitionSpec("dp")).devices_indices_map((rows,))
        spans = [index[0].indices(rows) for device, index in lying.items() if device.process_index == process]
        return min(start for start, _, _ in spans), max(stop for _, stop, _ in spans)

    def cut(self, tree: PyTree[Array], partitions: PyTree[PartitionSpec]) -> PyTree[Array]:
        """`tree`, in a program, lying so; one spec may stand for a subtree."""
        put = lambda part, x: jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, part))  # noqa: E731
        each = lambda part, sub: jax.tree.map(partial(put, part), sub)  # noqa: E731
        return jax.tree.map(each, partitions, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    @property
    def inside(self) -> bool:
        """Is this part of the program inside of a `jax.shard_map`, which has a mesh of its own: the same, some of its
        axes manual?"""
        return not jax.sharding.get_abstract_mesh().empty
