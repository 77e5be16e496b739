"""Hugging Face checkpoints: loading and saving. `models.hf_names` knows what a parameter is called outside."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlx.models import mxfp4
from rlx.models.description import Architecture, Params
from rlx.models.files import new_directory, read_json, write_json
from rlx.models.hf_config import architecture_config, read_config
from rlx.models.hf_names import HfTensor, found_names, hf_tensors
from rlx.models.spec import param_specs
from rlx.parallel.gather import piece

__all__ = ["HfTensor", "hf_tensors", "load_params", "read_architecture", "save_params", "to_hf"]

# What travels with the weights so that a saved directory can be served.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenization_*.py",
)
SHARD_BYTES = 5 * 10**9


def read_architecture(directory: Path | str) -> Architecture:
    """From config.json, with the names of tensors as the weights beside it, where there are any, have them.

    Raises what `hf_config.read_config` does, and ValueError for an index or a file of weights that is damaged.
    """
    arch = read_config(directory)
    if not any(Path(directory).glob("*.safetensors*")):
        return arch
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _tensor_files(Path(directory))]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        names = dataclasses.replace(found_names(arch.names, where), even_convolutions=_even_convolutions(where))
    return dataclasses.replace(arch, names=names)


def _even_convolutions(where: Mapping[str, Any]) -> bool:
    """Are the convolutions of queries and values cut to one size, wherever they belong?"""
    for name in where:
        if name.endswith(".q_conv1d.weight"):
            pair = name, name.replace("q_conv1d", "v_conv1d")
            query, value = (where[n].get_slice(n).get_shape() if n in where else None for n in pair)
            return query == value
    return False


def to_hf(arch: Architecture, params: Params) -> Iterator[tuple[str, Any]]:
    """(name, array) of every tensor, in the array library of `params`: numpy leaves give views, jax leaves slices."""
    flat = traverse_util.flatten_dict(params, sep="/")
    for name, tensor in hf_tensors(arch).items():
        array = piece(flat[tensor.path], tensor.part)
        yield name, (array.swapaxes(-1, -2) if tensor.transposed else array).reshape(tensor.shape)


# ------------------------------------------------------------------------------------------------------------- loading


def load_params(directory: Path | str, arch: Architecture, dtype: jnp.dtype | str = "float32") -> Params:
    """The checkpoint as a tree of numpy arrays of `dtype`, filled tensor by tensor from one or many safetensors files;
    weights in MXFP4 are unpacked.

    Raises FileNotFoundError where files are missing, ValueError where names, shapes or formats do not fit `arch`.
    """
    expected = hf_tensors(arch)
    specs = traverse_util.flatten_dict(param_specs(arch), sep="/")
    dtype = jnp.dtype(dtype)
    leaves = {path: np.empty(spec.shape, dtype) for path, spec in specs.items()}
    with contextlib.ExitStack() as stack:
        where = open_tensors(directory, arch, stack)
        for name, tensor in expected.items():
            array = (_read if name in where else read_packed)(where, name, tensor.shape).astype(dtype, copy=False)
            target = leaves[tensor.path][tensor.part]
            target[...] = array.swapaxes(-1, -2) if tensor.transposed else array.reshape(target.shape)
    return traverse_util.unflatten_dict(leaves, sep="/")


def open_tensors(directory: Path | str, arch: Architecture, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor, for as long as `stack` lasts. Raises what `load_params` does of names and files."""
    files = {path: stack.enter_context(_open(path)) for path in _tensor_files(Path(directory))}
    where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
    _check_names(directory, arch, mxfp4.plain_names(where), set(hf_tensors(arch)))
    if arch.tied and arch.names.head in where:
        _check_tied(directory, arch, where)
    return where


def _tensor_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {single.name} nor {index.name}; no other format is read")
    weight_map = read_json(index).get("weight_map")
    if not weight_map:
        raise ValueError(f"{index} has no weight_map: it names no files")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(missing)}")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _unpacked(where: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
    """Experts of Kimi K3, 4 bits a weight."""
    packed, scale = (where[n].get_tensor(n) for n in mxfp4.stored_names(name))
    try:
        return mxfp4.dequantise(packed, scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def read_packed(where: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    array = _unpacked(where, name)
    if array.shape != shape:
        raise ValueError(f"{name} unpacks to {array.shape}; config.json makes it {shape}")
    return array


def _read(where: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    stored_slice(where, name, shape)
    return where[name].get_tensor(name)


def stored_slice(where: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """What reads an index of the tensor when it is asked for. Raises ValueError for another shape or format."""
    found = where[name].get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise ValueError(f"{name} has shape {tuple(found.get_shape())}; config.json makes it {shape}")
    if found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(f"{name} is stored as {found.get_dtype()}; only F32, BF16, F16 and F64 are read")
    return found


def _check_names(directory: Path | str, arch: Architecture, found: set[str], expected: set[str]) -> None:
    ignored = {name for name in found - expected if is_ignored(arch, name)}
    if arch.tied:
        ignored.add(arch.names.head)  # compared with the embedding once both are read
    missing, unexpected = sorted(expected - found), sorted(found - expected - ignored)
    if missing or unexpected:
        parts = [("lacks", missing), ("has unexpected", unexpected)]
        said = "; ".join(f"{word} {len(names)} tensors: {_some(names)}" for word, names in parts if names)
        raise ValueError(f"{directory} does not fit its config.json ({arch.model_type}, tied={arch.tied}): {said}")


def is_ignored(arch: Architecture, name: str) -> bool:
    """Is it no part of the language model: constants, towers of other kinds, layers that predict further tokens?"""
    config = json.loads(arch.config)
    further = re.match(re.escape(f"{arch.names.model}layers.") + r"(\d+)\.", name)
    predicting = further is not None and config.get("num_nextn_predict_layers") and int(further[1]) >= arch.num_layers
    other_tower = "text_config" in config and not name.startswith(arch.names.model) and name != arch.names.head
    return bool(_is_constant(name) or name.startswith("mtp.") or other_tower or predicting)


def _is_constant(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _some(names: list[str], count: int = 6) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _check_tied(directory: Path | str, arch: Architecture, where: Mapping[str, Any]) -> None:
    embedding, head = (where[n].get_tensor(n) for n in (f"{arch.names.model}embed_tokens.weight", arch.names.head))
    if not np.array_equal(embedding, head):
        raise ValueError(
            f"{directory}: config.json says tie_word_embeddings, but lm_head.weight differs from the embedding: "
            "set it to false to use the head, or remove lm_head.weight"
        )


# -------------------------------------------------------------------------------------------------------------- saving


def save_params(
    directory: Path | str,
    arch: Architecture,
    params: Params,
    dtype: jnp.dtype | str = "bfloat16",
    *,
    tokenizer_from: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face directory, whole or not at all: config.json, safetensors (an index beside several shards).

    `tokenizer_from` is a model directory whose tokenizer files and special token ids go along, and its tensors beside
    the language model's (other towers, layers that predict further tokens), which config.json describes as well. Raises
    FileExistsError where `directory` exists, FileNotFoundError where `tokenizer_from` has no tokenizer.
    """
    dtype = jnp.dtype(dtype)
    config = architecture_config(arch, dtype.name)
    with new_directory(directory) as out:
        if tokenizer_from is not None:
            config |= _copy_tokenizer(Path(tokenizer_from), out)
        write_json(out / "config.json", config)
        others = {} if tokenizer_from is None else _further_tensors(Path(tokenizer_from), arch, dtype)
        shards = _plan_shards(arch, dtype.itemsize, shard_bytes, others)
        _write_shards(out, shards, itertools.chain(to_hf(arch, params), others.items()), dtype)
        if len(shards) > 1:
            size = dtype.itemsize * sum(int(np.prod(tensor.shape)) for tensor in hf_tensors(arch).values())
            _write_index(out, shards, size + sum(array.nbytes for array in others.values()))


def _further_tensors(source: Path, arch: Architecture, dtype: np.dtype[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What a checkpoint has beside the language model, but for constants that every reader computes itself."""
    if not any(source.glob("*.safetensors*")):
        return {}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _tensor_files(source)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        beside = sorted(mxfp4.plain_names(where) - hf_tensors(arch).keys())
        names = [name for name in beside if is_ignored(arch, name) and not _is_constant(name)]
        arrays = ((name, where[name].get_tensor(name) if name in where else _unpacked(where, name)) for name in names)
        return {name: array.astype(dtype, copy=False) for name, array in arrays}


def _plan_shards(arch: Architecture, itemsize: int, limit: int, others: Mapping[str, Any]) -> dict[str, list[str]]:
    """File name -> tensor names, in the order of `to_hf`; a shard exceeds `limit` bytes only by a single tensor. Those
    beside the language model are the last one."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in hf_tensors(arch).items():
        size = itemsize * int(np.prod(tensor.shape))
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if others:
        groups.append(list(others))
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_shards(
    out: Path, shards: Mapping[str, list[str]], tensors: Iterator[tuple[str, Any]], dtype: np.dtype[Any]
) -> None:
    for file, names in shards.items():
        # safetensors writes an array's memory as it lies, so a transposed view must be copied first.
        arrays = {
            name: np.ascontiguousarray(jax.device_get(array), dtype)
            for name, array in itertools.islice(tensors, len(names))
        }
        save_file(arrays, out / file, metadata={"format": "pt"})


def _write_index(out: Path, shards: Mapping[str, list[str]], total: int) -> None:
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _copy_tokenizer(source: Path, out: Path) -> dict[str, Any]:
    """Copies the tokenizer's files; returns the special token ids of the source's config.json."""
    files = [file for pattern in TOKENIZER_FILES for file in sorted(source.glob(pattern))]
    if not any(file.name.startswith(("tokenizer.", "vocab.")) for file in files):
        raise FileNotFoundError(f"{source} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    for file in files:
        shutil.copyfile(file, out / file.name)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: value for key, value in read_json(source / "config.json").items() if key in keys}
