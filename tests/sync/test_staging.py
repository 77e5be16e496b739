"""Versions are staged whole or not at all, hold what the trainer has, and share what did not change."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from rlx.models import hf
from rlx.sync import staging
from rlx.sync.bridge import Bridge
from rlx.sync.manifest import StagingError, check_files, read_manifest
from rlx.sync.naming import served_layout_unsupported_reason, served_name, served_parts, served_shape
from rlx.sync.served import served_checksums
from rlx.sync.staging import Staging, prune
from tests import tiny_model

ARCH = tiny_model.ARCH
BUCKET = 40_000


def stage(directory, params, version=1, dtype="float32", **options):
    return Staging(directory, ARCH, dtype, bucket_bytes=BUCKET, **options).stage(params, version)


def contents(staged):
    tensors = {}
    for file in staged.manifest.files:
        tensors |= load_file(staged.path / file)
    return tensors


def test_a_staged_version_is_a_checkpoint(tmp_path):
    params = tiny_model.params(3)
    staged = stage(tmp_path / "s", params, version=7)
    assert staged.path.name == "v00000007"
    assert len(staged.manifest.files) == 3
    assert hf.read_architecture(staged.path) == ARCH
    loaded = hf.load_params(staged.path, ARCH)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert read_manifest(staged.path) == staged.manifest
    check_files(staged.path, staged.manifest)
    assert (staged.path.stat().st_mode & 0o777) == 0o755


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksums_are_of_what_lies_in_the_files(tmp_path, dtype):
    staged = stage(tmp_path / "s", tiny_model.params(3), dtype=dtype)
    tensors = contents(staged)
    assert tensors.keys() == staged.manifest.tensors.keys()
    for name, entry in staged.manifest.tensors.items():
        assert entry.checksum == xxhash.xxh3_128(tensors[name].tobytes()).hexdigest()
        assert tensors[name].dtype == jnp.dtype(dtype)
    # What a server reports: rows of q, k and v as one tensor, the vocabulary filled up with rows of zeros.
    attention = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"].tobytes() for part in "qkv"]
    fused = hashlib.sha256(b"".join(attention)).hexdigest()[:16]
    assert staged.manifest.served["model.layers.1.self_attn.qkv_proj.weight"] == fused
    embedding = tensors["model.embed_tokens.weight"]
    padded = np.concatenate([embedding, np.zeros((-len(embedding) % 64, 32), embedding.dtype)])
    assert staged.manifest.served["model.embed_tokens.weight"] == hashlib.sha256(padded.tobytes()).hexdigest()[:16]
    down = np.pad(tensors["model.layers.0.mlp.down_proj.weight"], ((0, 0), (0, 16)))
    assert (
        staged.manifest.served["model.layers.0.mlp.down_proj.weight"] == hashlib.sha256(down.tobytes()).hexdigest()[:16]
    )


def test_what_a_server_on_a_cpu_reports_is_not_hashed_for_others(tmp_path):
    staged = stage(tmp_path / "s", tiny_model.params(3), for_cpu=False)
    assert staged.manifest.served == {}
    known = served_checksums(staged.path, staged.manifest.tensors, "float32", "cpu", None)
    assert known == stage(tmp_path / "t", tiny_model.params(3)).manifest.served


def test_a_served_tensor_whose_parts_lie_in_several_versions_files_is_hashed_whole(tmp_path):
    staging_ = Staging(tmp_path / "s", ARCH, "float32", bucket_bytes=BUCKET)
    params = tiny_model.params(1)
    for version in (1, 2, 3):
        layers = traverse_util.flatten_dict(params["layers"])
        (query,) = [path for path in layers if path[-2:] == ("q_proj", "kernel")]
        params = {**params, "layers": traverse_util.unflatten_dict({**layers, query: layers[query] + 1.0})}
        staged = staging_.stage(params, version)
    assert staging_.written_bytes < staged.manifest.nbytes / 2
    assert staged.manifest.served == stage(tmp_path / "alone", params).manifest.served


def test_what_two_versions_share_is_linked_and_the_rest_is_written(tmp_path):
    staging_ = Staging(tmp_path / "s", ARCH, "float32", bucket_bytes=BUCKET)
    params = tiny_model.params(1)
    first = staging_.stage(params, 1)
    assert staging_.written_bytes == first.manifest.nbytes
    versions = [first]
    for version in (2, 3):
        params = {**params, "final_norm": tiny_model.params(version)["final_norm"]}
        versions.append(staging_.stage(params, version))
    # The second version sorts what changed from what did not, so that the third one writes the norm alone.
    assert staging_.written_bytes < 1000 + 32 * 4
    inodes = [{os.stat(v.path / f).st_ino for f in v.manifest.files} for v in versions]
    assert len(inodes[1] & inodes[2]) == len(inodes[1]) - 1
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(versions[2].path, ARCH), params)
    assert versions[2].manifest.served == stage(tmp_path / "alone", params).manifest.served
    assert len(set(versions[1].digests.values()) & set(versions[2].digests.values())) == len(inodes[1]) - 1


def test_a_leaf_that_is_another_array_has_changed_though_its_numbers_have_not(tmp_path):
    staging_ = Staging(tmp_path / "s", ARCH, "float32", bucket_bytes=BUCKET)
    first = staging_.stage(tiny_model.params(1), 1)
    second = staging_.stage(tiny_model.params(1), 2)
    assert staging_.written_bytes == second.manifest.nbytes
    assert sorted(first.digests.values()) == sorted(second.digests.values())  # so nothing of it is sent


def test_a_version_that_comes_again_does_not_touch_the_first(tmp_path):
    first = stage(tmp_path / "s", tiny_model.params(1))
    again = stage(tmp_path / "s", tiny_model.params(2))
    assert first.path != again.path
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(first.path, ARCH), tiny_model.params(1))


def test_nothing_is_left_of_a_version_that_could_not_be_written(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        stage(tmp_path / "s", tiny_model.params(1))
    assert list((tmp_path / "s").iterdir()) == []


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path):
    left = tmp_path / "s" / ".v00000003.abc"
    left.mkdir(parents=True)
    Staging(tmp_path / "s", ARCH, "float32")
    assert not left.exists()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda p: {**p, "final_norm": p["final_norm"].at[3].set(jnp.nan)}, "NaN"),
        (lambda p: {**p, "embed": p["embed"].T}, "shape"),
        (lambda p: {k: v for k, v in p.items() if k != "embed"}, "lack"),
        (lambda p: {**p, "embed": jnp.zeros(p["embed"].shape, jnp.int32)}, "floating"),
    ],
)
def test_weights_that_must_not_be_served_are_refused(tmp_path, change, said):
    with pytest.raises(StagingError, match=said):
        stage(tmp_path / "s", change(tiny_model.params(1)))
    assert list((tmp_path / "s").iterdir()) == []


def test_a_type_that_cannot_travel_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="int8"):
        Staging(tmp_path / "s", ARCH, "int8")


def test_sharded_arrays_are_gathered_bit_for_bit(tmp_path, devices8):
    params = tiny_model.params(2)
    mesh = Mesh(np.array(devices8[:4]).reshape(2, 2), ("x", "y"))

    def shard(x):
        axes = ("x", "y") if x.ndim == 3 else (None,) * x.ndim
        spec = [axis if axis and x.shape[i] % 2 == 0 else None for i, axis in enumerate((None, *axes)[: x.ndim])]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    sharded = jax.tree.map(shard, params)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(sharded))
    whole, parts = stage(tmp_path / "a", params), stage(tmp_path / "b", sharded)
    assert whole.manifest == parts.manifest


def test_only_old_versions_that_nobody_needs_are_pruned(tmp_path):
    paths = [stage(tmp_path / "s", tiny_model.params(1), version).path for version in (1, 2, 3, 4)]
    assert prune(tmp_path / "s", {paths[1]}, keep=1) == [paths[0], paths[2]]
    assert sorted((tmp_path / "s").iterdir()) == [paths[1], paths[3]]


def test_a_version_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch):
    first, second = (stage(tmp_path / "s", tiny_model.params(1), version).path for version in (1, 2))
    remove = shutil.rmtree

    def held(path):
        if path == first:
            raise OSError(16, "Device or resource busy")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", held)
    with pytest.warns(UserWarning, match="v00000001 .* busy"):
        assert prune(tmp_path / "s", set(), keep=0) == [second]


def test_links_that_are_done_at_once_do_not_remove_a_version_twice(tmp_path, monkeypatch, recwarn):
    for version in range(6):
        stage(tmp_path / "s", tiny_model.params(1), version)
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: (time.sleep(0.01), remove(path)))
    bridge = Bridge(Staging(tmp_path / "s", ARCH, "float32"), lambda: None, keep=1)

    async def all_at_once():
        await asyncio.gather(*(bridge.tidy() for _ in range(4)), bridge.close())

    asyncio.run(all_at_once())
    assert not [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    assert not list((tmp_path / "s").iterdir())


def test_served_names_and_shapes():
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("v", "o", "k", "q")]
    assert served_parts(names) == {
        "model.layers.0.self_attn.qkv_proj.weight": (names[3], names[2], names[0]),
        names[1]: (names[1],),
    }
    assert served_name("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.gate_up_proj.weight"
    assert served_shape("lm_head.weight", (65, 8), "cuda") == (128, 8)
    assert served_shape("model.layers.0.mlp.down_proj.weight", (8, 33), "cpu") == (8, 64)
    assert served_shape("model.layers.0.mlp.down_proj.weight", (8, 33), "cuda") == (8, 33)
    assert served_shape("model.norm.weight", (8,), "cpu") == (8,)
    assert served_layout_unsupported_reason(names) is None
    assert "experts" in served_layout_unsupported_reason([*names, "model.layers.0.mlp.experts.0.up_proj.weight"])
