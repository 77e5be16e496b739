"""A checkpoint that is read onto a mesh: the same parameters, and of every tensor only what the devices hold."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import traverse_util

from rlx.models import hf, sharded
from rlx.models.placed import shardings
from rlx.models.sharded import load_sharded, overlap
from rlx.models.spec import param_specs
from rlx.parallel.layout import parse_layout
from rlx.parallel.mesh import Placement, make_mesh

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def placed(layout: str) -> Placement:
    return Placement(make_mesh(parse_layout(layout)), parse_layout(layout))


@pytest.mark.parametrize(
    "name, layout, dtype",
    [
        ("qwen3_tied", "TP2 DP2", "float32"),
        ("qwen3_moe", "TP2 DP2 EP4", "bfloat16"),
        ("qwen3_5_moe_vl_hub", "DP2 EP2", "float32"),
        ("kimi_k3", "TP2 EP2", "float32"),
    ],
)
def test_every_parameter_is_what_one_device_loads(name, layout, dtype):
    directory = FIXTURES / name
    arch = hf.read_architecture(directory)
    where = shardings(param_specs(arch), arch, placed(layout))
    found = traverse_util.flatten_dict(load_sharded(directory, arch, dtype, where), sep="/")
    wanted = traverse_util.flatten_dict(hf.load_params(directory, arch, dtype), sep="/")
    places = traverse_util.flatten_dict(where, sep="/")
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        assert found[path].sharding == places[path]
        assert found[path].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(found[path]), x, err_msg=path)


def test_nothing_is_read_twice_and_nothing_that_no_device_holds(monkeypatch):
    directory = FIXTURES / "qwen3_tied"
    arch = hf.read_architecture(directory)
    where = shardings(param_specs(arch), arch, placed("TP2 DP2"))
    read: list[int] = []
    monkeypatch.setattr(sharded, "_read", _counting(sharded._read, read))
    params = load_sharded(directory, arch, "float32", where)
    assert sum(read) == sum(x.size for x in jax.tree.leaves(params))
    # The half of the embedding that one TP rank holds, dp and the other rank left out.
    read.clear()
    part = sharded._region(*_embedding(directory, arch), region=((0, 8), (0, 4)), dtype=np.dtype("float32"))
    assert part.shape == (8, 4)
    assert read == [32]


def _counting(read, counts):
    def counted(*given):
        array = read(*given)
        counts.append(array.size)
        return array

    return counted


def _embedding(directory, arch):
    where = {name: file for path in hf._tensor_files(directory) for file in [hf._open(path)] for name in file.keys()}  # noqa: SIM118
    tensors = [(name, t) for name, t in hf.hf_tensors(arch).items() if t.path == "embed"]
    return where, tensors, param_specs(arch)["embed"].shape


@pytest.mark.parametrize(
    "part, region, expected",
    [
        ((), ((2, 4), (0, 6)), ((slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6)))),
        ((1,), ((0, 2), (3, 6)), ((1, slice(0, 3)), (slice(3, 6),))),
        ((1,), ((2, 4), (0, 6)), None),
        ((slice(None), slice(4, 6)), ((0, 4), (3, 5)), ((slice(0, 4), slice(1, 2)), (slice(0, 4), slice(0, 1)))),
        ((slice(None), slice(4, 6)), ((0, 4), (0, 4)), None),
    ],
)
def test_what_a_tensor_holds_of_a_region(part, region, expected):
    assert overlap(part, (4, 6), region) == expected
