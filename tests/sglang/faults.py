"""Faults of weights on their way from the trainer to an engine, by the place where they are planted.

WEIGHTS   in the parameters that are published
STAGED    in the files, after they were staged
TRANSIT   in what leaves: the engine is sent other tensors than were staged, and nobody notices on the way
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rlx.sync.manifest import header
from rlx.sync.staging import Staged

Tensors = dict[str, np.ndarray]
ATTENTION = "model.layers.{}.self_attn.{}.weight"
MLP = "model.layers.{}.mlp.{}.weight"

# ---------------------------------------------------------------------------------------------------------- parameters


def _leaf(params: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """`params` with one leaf changed, found by the end of its path; the others are shared."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = ["/".join(str(key.key) for key in at) for at, _ in leaves]
    (index,) = [i for i, name in enumerate(names) if name.endswith(path)]
    return structure.unflatten([change(x) if i == index else x for i, (_, x) in enumerate(leaves)])


def _without(params: Any, name: str) -> Any:
    return {k: v for k, v in params.items() if k != name}


WEIGHTS = {
    "tensor missing": lambda p: _without(p, "final_norm"),
    "tensor of no model": lambda p: {**p, "final_norm_2": p["final_norm"]},
    "tensor misnamed": lambda p: {**_without(p, "final_norm"), "norm": p["final_norm"]},
    "embedding transposed": lambda p: {**p, "embed": p["embed"].T},
    "vocabulary too short": lambda p: {**p, "embed": p["embed"][:-1]},
    "NaN": lambda p: _leaf(p, "down_proj/kernel", lambda x: x.at[0, 0, 0].set(jnp.nan)),
    "infinity": lambda p: _leaf(p, "o_proj/kernel", lambda x: x.at[0, 0, 0].set(jnp.inf)),
    "whole numbers": lambda p: {**p, "embed": p["embed"].astype(jnp.int32)},
}

# --------------------------------------------------------------------------------------------------------------- files


def _rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8:start])
    change(entries)
    text = json.dumps(entries, separators=(",", ":")).encode().ljust(start - 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[start:])


def _rename(entries: dict[str, Any]) -> None:
    name = next(n for n in entries if n.endswith("q_proj.weight"))
    entries[name.replace("q_proj", "p_proj")] = entries.pop(name)


def _transpose(entries: dict[str, Any]) -> None:
    name = next(n for n in entries if n.endswith("down_proj.weight"))
    entries[name]["shape"].reverse()


def _retype(entries: dict[str, Any]) -> None:
    name = next(n for n in entries if n.endswith("q_proj.weight"))
    entries[name]["dtype"] = "I32"


STAGED: dict[str, Callable[[Path], Any]] = {
    "file truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "file missing": lambda path: path.unlink(),
    "file longer": lambda path: path.write_bytes(path.read_bytes() + b"0000"),
    "file of another kind": lambda path: path.write_bytes(b"\x80\x02".ljust(path.stat().st_size)),
    "tensor renamed in a file": lambda path: _rewrite_header(path, _rename),
    "shape transposed in a file": lambda path: _rewrite_header(path, _transpose),
    "dtype changed in a file": lambda path: _rewrite_header(path, _retype),
}

# ------------------------------------------------------------------------------------------------------------- transit


def _changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors, Tensors], Tensors]:
    return lambda new, old: {**new, name: np.ascontiguousarray(change(new[name]))}


def _swapped(a: str, b: str) -> Callable[[Tensors, Tensors], Tensors]:
    return lambda new, old: {**new, a: new[b], b: new[a]}


def _one_value(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(x.size).reshape(x.shape) == 5, np.nextafter(x, np.float32(np.inf)), x)


def _misnamed(new: Tensors, old: Tensors) -> Tensors:
    name = ATTENTION.format(1, "o_proj")
    return {k.replace("o_proj", "out_proj") if k == name else k: v for k, v in new.items()}


# What is sent in place of the new version's tensors, given them and the tensors of the version before.
TRANSIT: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "one value off by one bit": _changed(ATTENTION.format(0, "k_proj"), _one_value),
    "tensor not sent": lambda new, old: {k: v for k, v in new.items() if k != MLP.format(1, "down_proj")},
    "tensor sent under an unknown name": _misnamed,
    "square tensor transposed": _changed(ATTENTION.format(0, "q_proj"), lambda x: x.T),
    "layers swapped": _swapped(MLP.format(0, "up_proj"), MLP.format(1, "up_proj")),
    "gate and up swapped": _swapped(MLP.format(0, "gate_proj"), MLP.format(0, "up_proj")),
    "key and value swapped": _swapped(ATTENTION.format(1, "k_proj"), ATTENTION.format(1, "v_proj")),
    "tensor stale": lambda new, old: {**new, MLP.format(0, "gate_proj"): old[MLP.format(0, "gate_proj")]},
    "all of it stale": lambda new, old: old,
    "rounded to bfloat16": lambda new, old: {
        k: v.astype(ml_dtypes.bfloat16).astype(np.float32) for k, v in new.items()
    },
    "NaN on the way": _changed(MLP.format(1, "gate_proj"), lambda x: np.full_like(x, np.nan)),
    "zeros": _changed(MLP.format(1, "up_proj"), np.zeros_like),
    "scaled": _changed("model.norm.weight", lambda x: 1.01 * x),
    "rows moved by one": _changed("model.embed_tokens.weight", lambda x: np.roll(x, 1, 0)),
}


def tensors_of(staged: Staged) -> Tensors:
    files = {name: np.memmap(staged.path / name, np.uint8, "r") for name in staged.manifest.files}
    return {
        name: files[e.file][e.offset : e.offset + 4 * int(np.prod(e.shape))].view(np.float32).reshape(e.shape)
        for name, e in staged.manifest.tensors.items()
    }


def altered(staged: Staged, tensors: Tensors, directory: Path) -> Staged:
    """A copy of a staged version with other tensors in its first file, alone, and a manifest that agrees with it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    file = next(iter(staged.manifest.files))
    head = header("float32", {name: x.shape for name, x in tensors.items()})
    entries, at = {}, len(head)
    for name, x in tensors.items():
        entries[name] = dataclasses.replace(
            staged.manifest.tensors.get(name, next(iter(staged.manifest.tensors.values()))),
            file=file,
            offset=at,
            shape=x.shape,
        )
        at += x.nbytes
    (directory / file).write_bytes(head + b"".join(x.tobytes() for x in tensors.values()))
    shutil.copy(staged.path / "config.json", directory)
    manifest = dataclasses.replace(staged.manifest, files={file: at}, tensors=entries)
    return dataclasses.replace(staged, path=directory, manifest=manifest)
