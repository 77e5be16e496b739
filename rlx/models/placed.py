"""A model on a mesh: the sizes that a layout must divide, and where each of its parameters lies."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rlx.config.cluster import ClusterConfig
from rlx.config.schema import Config
from rlx.models.description import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    LatentAttention,
    Params,
    ParamSpec,
)
from rlx.models.kinds import recurrent
from rlx.parallel.layout import Divisible, Layout, micro_batches, rounds_of, ticks
from rlx.parallel.mesh import Partitions, Placement, make_mesh
from rlx.parallel.rules import partition


def sizes_of(arch: Architecture, row_tokens: int = 0, rows: int = 0, config: Config | None = None) -> Divisible:
    """What a layout must divide. Sizes that differ between layers are their greatest common divisor.

    row_tokens, rows: of a micro-batch, 0 = not known. config: what else a layout must allow, None = nothing.
    """
    cluster = None if config is None else config.cluster
    mixers, feeds = [layer.mixer for layer in arch.layers], [layer.mlp for layer in arch.layers]
    attending = [m for m in mixers if isinstance(m, Attention | LatentAttention)]
    experts = [feed.count for feed in feeds if isinstance(feed, Experts)]
    dense = [feed.shared_width if isinstance(feed, Experts) else feed.width for feed in feeds]
    deltas = [n for m in mixers if isinstance(m, DeltaNet) for n in (m.key_heads, m.value_heads)]
    deltas += [m.heads for m in mixers if isinstance(m, KimiDelta)]
    kv_heads = [m.kv_heads for m in attending if isinstance(m, Attention)]
    return Divisible(
        heads=math.gcd(*(m.heads for m in attending)),
        kv_heads=math.gcd(*kv_heads) if kv_heads else math.gcd(*(m.heads for m in attending)),
        mlp=math.gcd(*dense),
        vocab=arch.vocab_size,
        periods=max(group.repeats for group in arch.groups),
        experts=math.gcd(*experts) if experts else 0,
        recurrent_heads=math.gcd(*deltas) if deltas else 0,
        row_tokens=row_tokens,
        rows=rows,
        rounds=1 if cluster is None else cluster.pipeline_rounds,
        ring=cluster is not None and cluster.context_parallel == "ring",
        fixed_parts=config is not None and config.learner.row_shape is not None,
        sequence_parallel=cluster is not None and cluster.sequence_parallel,
    )


def placement_of(cluster: ClusterConfig, layout: Layout, rows: int) -> Placement:
    """The mesh of a layout for micro-batches of so many rows, whatever layout `cluster` itself names.

    Raises:
      LayoutError: where there are fewer devices than the layout needs.
    """
    return Placement(
        make_mesh(layout),
        layout,
        micro_batches(layout, rows),
        rounds=cluster.pipeline_rounds,
        ring=cluster.context_parallel == "ring",
        sequence_parallel=cluster.sequence_parallel,
    )


def bubble(arch: Architecture, layout: Layout, parts: int, rounds: int) -> float:
    """Share of a pipeline's time that a stage waits: (S - 1) / (v M + S - 1), arXiv 1811.06965 with one block a stage,
    arXiv 2104.04473, section 2.2, with v of them, as many as each group of layers has (`rounds_of`).

    Repeats that pad a block are no waiting: they are computed.
    """
    waiting, total = 0, 0
    for group in arch.groups:
        if group.repeats >= layout.pp:
            own = rounds_of(group.repeats, layout, rounds)
            block = len(group.pattern) * math.ceil(group.repeats / (layout.pp * own))
            waiting, total = waiting + block * (layout.pp - 1), total + block * ticks(layout, parts, own)
    return waiting / total


def partitions(specs: Params, arch: Architecture, layout: Layout) -> PyTree[PartitionSpec]:
    """Where each parameter, or each factor of an adapter, of these specs lies."""
    sizes = sizes_of(arch)
    cut = lambda spec: partition(spec.shape, spec.axes, layout, sizes)  # noqa: E731
    return jax.tree.map(cut, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def shardings(specs: Params, arch: Architecture, placement: Placement) -> PyTree[NamedSharding]:
    """`partitions` on the mesh."""
    return jax.tree.map(lambda part: NamedSharding(placement.mesh, part), partitions(specs, arch, placement.layout))


def place(tree: PyTree[Array], specs: Params, arch: Architecture, placement: Placement) -> PyTree[Array]:
    """Parameters, or an adapter, onto the mesh."""
    return jax.tree.map(jax.device_put, tree, shardings(specs, arch, placement))


def training(placement: Placement, trained: Params, arch: Architecture) -> Placement:
    """`placement` for updates of parameters of these specs: their gradients lie as they do."""
    return dataclasses.replace(placement, trained=Partitions.of(partitions(trained, arch, placement.layout)))


def keeps_order(arch: Architecture) -> bool:
    """Must a row's tokens lie in their own order? Where layers carry a state from token to token."""
    return any(recurrent(layer.mixer) for layer in arch.layers)
