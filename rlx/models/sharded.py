"""Loading a checkpoint onto a mesh: every process reads the parts of its tensors that its own devices hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from rlx.models import hf
from rlx.models.description import Architecture, Params
from rlx.models.hf_names import HfTensor, hf_tensors
from rlx.models.spec import param_specs

Region = tuple[tuple[int, int], ...]  # of a leaf: first and last + 1 on every axis


class Overlap(NamedTuple):
    """What a tensor holds of a region of a leaf."""

    target: tuple[Any, ...]  # index into the region
    source: tuple[slice, ...]  # index into the tensor, as the leaf has it


def load_sharded(
    directory: Path | str, arch: Architecture, dtype: jnp.dtype | str, shardings: PyTree[NamedSharding]
) -> Params:
    """`hf.load_params` onto devices, each parameter where `shardings` has it. Raises what that does."""
    tensors: dict[str, list[tuple[str, HfTensor]]] = {}
    for name, tensor in hf_tensors(arch).items():
        tensors.setdefault(tensor.path, []).append((name, tensor))
    specs = traverse_util.flatten_dict(param_specs(arch), sep="/")
    places = traverse_util.flatten_dict(shardings, sep="/")
    with contextlib.ExitStack() as stack:
        where = hf.open_tensors(directory, arch, stack)
        leaves = {
            path: _leaf(where, tensors[path], spec.shape, jnp.dtype(dtype), places[path])
            for path, spec in specs.items()
        }
    return traverse_util.unflatten_dict(leaves, sep="/")


def _leaf(
    where: Mapping[str, Any],
    tensors: list[tuple[str, HfTensor]],
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: NamedSharding,
) -> Array:
    read: dict[Region, np.ndarray] = {}  # devices may hold the same part

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only for a sharding without devices
        region = tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        if region not in read:
            read[region] = _region(where, tensors, shape, region, dtype)
        return read[region]

    return jax.make_array_from_callback(shape, sharding, part)


def _region(
    where: Mapping[str, Any],
    tensors: list[tuple[str, HfTensor]],
    shape: tuple[int, ...],
    region: Region,
    dtype: jnp.dtype,
) -> np.ndarray:
    out = np.empty([last - first for first, last in region], dtype)
    for name, tensor in tensors:
        if (found := overlap(tensor.part, shape, region)) is not None:
            size = np.broadcast_to(0, shape)[tensor.part].shape  # no memory: only the shape is wanted
            out[found.target] = _read(where, name, tensor, size, found.source).astype(dtype, copy=False)
    return out


def overlap(part: tuple[Any, ...], shape: tuple[int, ...], region: Region) -> Overlap | None:
    """What the tensor at `part` of a leaf holds of `region`, None for nothing."""
    target: list[Any] = []
    source: list[slice] = []
    parts = (*part, *(slice(None),) * (len(shape) - len(part)))
    for own, size, (first, last) in zip(parts, shape, region, strict=True):
        start, stop, _ = own.indices(size) if isinstance(own, slice) else (own, own + 1, 1)
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return None
        if isinstance(own, slice):
            target.append(slice(low - first, high - first))
            source.append(slice(low - start, high - start))
        else:
            target.append(low - first)
    return Overlap(tuple(target), tuple(source))


def _read(
    where: Mapping[str, Any], name: str, tensor: HfTensor, size: tuple[int, ...], source: tuple[slice, ...]
) -> np.ndarray:
    """`source` of the tensor as its leaf has it, of `size`."""
    if name not in where:
        whole = hf.read_packed(where, name, tensor.shape)
        return (whole.swapaxes(-1, -2) if tensor.transposed else whole.reshape(size))[source]
    stored = hf.stored_slice(where, name, tensor.shape)
    if tensor.transposed:
        *leading, inputs, outputs = source
        return stored[(*leading, outputs, inputs)].swapaxes(-1, -2)
    return stored[source] if tensor.shape == size else stored[:].reshape(size)[source]
