"""From a parameter tree on devices to the tensors of a checkpoint on the host, one after the other.

A device holds a few tensors more than it did, never a stack of layers or a shard of one: tensors are taken out of an
array on several devices one by one, and those of several hosts gathered alone. The host holds what the caller keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils

from rlx.models.description import Architecture, Params
from rlx.models.spec import param_specs
from rlx.sync.manifest import MAX_NAMED, StagingError

AHEAD = 4  # tensors whose way to the host begins before they are asked for


class Leaves:
    """Remembers the arrays of a version without keeping them, to tell which ones the next version shares."""

    def __init__(self, params: Params):
        self._seen = {path: weakref.ref(leaf) for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}

    def changed(self, params: Params) -> set[str]:
        """Paths of `params` whose array is another object than it was. A shared one cannot have changed."""
        flat = traverse_util.flatten_dict(params, sep="/")
        return {path for path, leaf in flat.items() if path not in self._seen or self._seen[path]() is not leaf}


def check_params(arch: Architecture, params: Params) -> None:
    """Raises StagingError for a tree that is no parameter tree of `arch`, or holds numbers that are not finite."""
    specs = traverse_util.flatten_dict(param_specs(arch), sep="/")
    flat = traverse_util.flatten_dict(params, sep="/")
    if flat.keys() != specs.keys():
        lacks, extra = sorted(specs.keys() - flat.keys()), sorted(flat.keys() - specs.keys())
        raise StagingError(
            f"the weights lack {lacks[:MAX_NAMED]} and have {extra[:MAX_NAMED]}, which the model has not"
        )
    for path, spec in specs.items():
        if tuple(flat[path].shape) != spec.shape:
            raise StagingError(f"{path} has shape {tuple(flat[path].shape)}, the model makes it {spec.shape}")
    check_finite(flat)


@jax.jit
def _finite(leaf: Any) -> Any:
    return jnp.isfinite(leaf).all()


def _is_finite(leaf: Any) -> Any:
    """On the devices that have it; of the host it stays there."""
    return np.isfinite(leaf).all() if isinstance(leaf, np.ndarray) else _finite(leaf)


def check_finite(flat: Mapping[str, Any]) -> None:
    """Raises StagingError for an array that has other than floating-point numbers, or one that is NaN or infinite."""
    for path, leaf in flat.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise StagingError(f"{path} has type {leaf.dtype}: weights are floating-point numbers")
    found = jax.device_get({path: _is_finite(leaf) for path, leaf in flat.items()})
    bad = sorted(path for path, good in found.items() if not good)
    if bad:
        raise StagingError(f"{bad[:MAX_NAMED]} hold NaN or infinity: they are not published")


def host_tensors(tensors: Iterator[tuple[str, Any]], dtype: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The same on the host, cast to `dtype`, contiguous. On several hosts each must ask for all of them, in order."""
    waiting: list[tuple[str, Any]] = []
    for name, array in tensors:
        cast = jnp.asarray(array).astype(dtype)
        if not cast.is_fully_addressable:
            cast = multihost_utils.process_allgather(cast, tiled=True)
        else:
            cast.copy_to_host_async()
        waiting.append((name, cast))
        if len(waiting) > AHEAD:
            first, value = waiting.pop(0)
            yield first, np.ascontiguousarray(value)
    for first, value in waiting:
        yield first, np.ascontiguousarray(value)
