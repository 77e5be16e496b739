"""What leaves a mesh leaves it in pieces, and no device gets more than one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlx.parallel import gather
from rlx.parallel.gather import Gather, piece
from rlx.parallel.layout import Layout
from rlx.parallel.mesh import Placement, make_mesh

SHAPE = (4, 8, 16, 32)  # layers, experts, inputs, outputs


@pytest.fixture(scope="module")
def spread() -> tuple[Placement, jax.Array]:
    layout = Layout(pp=2, tp=4)
    placement = Placement(make_mesh(layout), layout)
    where = NamedSharding(placement.mesh, PartitionSpec("pp", "tp"))
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return placement, jax.device_put(values, where)


@pytest.mark.parametrize("part", [(1,), (3, 5), (2, 7, slice(None), slice(8, 24)), (slice(1, 3),)])
def test_a_piece_is_what_an_index_gives(spread, part):
    _, x = spread
    assert np.array_equal(piece(x, part), np.asarray(x)[part])
    assert piece(np.asarray(x), part).base is not None, "of numpy a view"


def test_a_piece_takes_no_more_of_a_device_than_itself(spread):
    _, x = spread
    numbers = tuple(np.array([n], np.int32) for n in (3, 5))
    compiled = gather._taken.lower(x, numbers).compile()
    size = x.nbytes // (SHAPE[0] * SHAPE[1])
    assert compiled.memory_analysis().output_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * size < x.nbytes // 8
    # A plain index moves a shard, which is why it is not used.
    plain = jax.jit(lambda x: x[3, 5]).lower(x).compile()
    assert plain.memory_analysis().temp_size_in_bytes >= x.nbytes // 8


def test_gathered_arrays_are_whole(spread):
    placement, x = spread
    tree = {"stack": x, "norm": jax.device_put(jnp.ones(8), NamedSharding(placement.mesh, PartitionSpec("tp")))}
    host = Gather(placement, {}, "host")(tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in host.values())
    assert np.array_equal(host["stack"], x)
    local = Gather(placement, {}, "device")(tree)
    assert all(leaf.devices() == {jax.local_devices()[0]} for leaf in local.values())
    assert np.array_equal(local["stack"], x)
