"""Which dimension of a parameter lies over which axis of the mesh: one table of logical axes.

Tensor parallelism is Megatron's (arXiv 1909.08053): a column-parallel product into heads or MLP width, a row-parallel
one out of it, the vocabulary cut for embedding and head. What an axis leaves whole is cut over dp (ZeRO, arXiv
1910.02054): base weights, adapters and the optimizer's state alike, gathered where they are used. Stacks of layers that
a pipeline's stages do not divide are cut over pp in the same way, and dealt out to the stages in the program.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec

from rlx.parallel.layout import Axis, Divisible, Layout

# Cut over tp wherever TP divides the model's sizes, which `layout.check` has seen to.
TENSOR = frozenset({"vocab", "heads", "heads_value", "heads_key_value", "mlp", "shared_mlp"})
RECURRENT = frozenset({"recurrent_heads", "recurrent_value", "recurrent_key", "recurrent_qkv"})
# What ZeRO may cut, the first of a parameter's dimensions that dp divides.
ZERO = ("embed", "latent_mlp", "latent", "query_latent", "mlp", "expert_mlp", "expert_gate_up", "rank")


def partition(shape: tuple[int, ...], axes: tuple[str, ...], layout: Layout, sizes: Divisible) -> PartitionSpec:
    """How a parameter of this shape, with logical `axes`, is cut."""
    cut: list[str | tuple[str, ...] | None] = [
        _axis(name, size, layout, sizes) for name, size in zip(axes, shape, strict=True)
    ]
    over: list[Axis] = ["dp"] if layout.dp > 1 and "dp" not in axes_of(PartitionSpec(*cut)) else []
    staged = next((size for name, size in zip(axes, shape, strict=True) if name == "layer"), 0) >= layout.pp > 1
    over += ["pp"] if staged and "pp" not in axes_of(PartitionSpec(*cut)) else []
    for axis in over:
        free = [i for name in ZERO for i, own in enumerate(axes) if own == name and cut[i] is None]
        dimension = next((i for i in free if shape[i] % layout.size(axis) == 0), None)
        if dimension is not None:
            cut[dimension] = axis
    return PartitionSpec(*cut)


def axes_of(spec: PartitionSpec) -> set[str]:
    """The axes of the mesh that an array is cut over."""
    return {axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)}


def _axis(name: str, size: int, layout: Layout, sizes: Divisible) -> str | tuple[str, ...] | None:
    if name == "layer":
        return "pp" if layout.pp > 1 and size >= layout.pp and size % layout.pp == 0 else None
    if name == "expert":
        return layout.expert_axes if layout.ep > 1 and size % layout.ep == 0 else None
    tensor = name in TENSOR or (name == "kv_heads" and sizes.kv_heads % layout.tp == 0)
    tensor |= name in RECURRENT and sizes.recurrent_heads % layout.tp == 0
    return "tp" if layout.tp > 1 and tensor and size % layout.tp == 0 else None
