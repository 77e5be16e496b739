"""One of several processes that hold a model together: `python -m tests.sync.one_host PORT RANK PROCESSES DIRECTORY`.

Stages the tiny model, sharded over all of them, and prints the digest of what the first one wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx.models.description import Params
from rlx.parallel.gather import Gather
from rlx.parallel.layout import Layout
from rlx.parallel.mesh import Placement, make_mesh
from rlx.sync.staging import Staging
from tests import tiny_model


def main(port: str, rank: str, processes: str, directory: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(rank))
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def shard(x: jax.Array) -> jax.Array:
        axis = next((i for i in range(x.ndim - 1, -1, -1) if x.shape[i] % len(mesh.devices) == 0), None)
        spec = PartitionSpec(*("x" if i == axis else None for i in range(x.ndim)))
        host = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: host[index])

    params = jax.tree.map(shard, tiny_model.params(2))
    check_gathered(params, int(rank))
    assert any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
    staged = Staging(Path(directory), tiny_model.ARCH, "float32", bucket_bytes=40_000).stage(params, 1)
    # jax's own libraries write to the same place.
    print("digests:", *(["none"] if staged is None else sorted(staged.digests.values())))


def check_gathered(params: Params, rank: int) -> None:
    """The first process gets whole arrays on its host, the other one nothing."""
    layout = Layout(dp=jax.device_count())
    gather = Gather(Placement(make_mesh(layout), layout), {}, "nowhere" if rank else "host")
    for found, whole in zip(jax.tree.leaves(gather(params)), jax.tree.leaves(tiny_model.params(2)), strict=True):
        assert found.size == 0 if rank else np.array_equal(found, whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
