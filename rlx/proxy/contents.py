"""What a model directory holds, by content: equal weights have one hash wherever they lie and however they are cut."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from rlx.metrics.jsonl import read_json

CHUNK = 1 << 24  # bytes read at once
SETTLED_S = 2.0  # a file that was written later may be written once more at what its clock calls the same time
ADAPTER = "adapter_config.json"
# Keys of a config.json that say where it came from and not what the model is.
BESIDE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "base_model_name_or_path", "revision")


class Contents(NamedTuple):
    """A checkpoint or an adapter."""

    hash: str  # sha256, hexadecimal
    parameters: int
    size_bytes: int  # of the tensors
    adapter_of: str  # the directory that an adapter's own config names, "" for a whole model


def read_contents(directory: Path | str) -> Contents:
    """Reads every byte of the weights, again only where a file's time or size has changed.

    Raises:
      FileNotFoundError: no model or adapter there. ValueError: a file that is cut short or is not safetensors.
    """
    directory = Path(directory)
    adapter = directory / ADAPTER
    described = adapter if adapter.is_file() else directory / "config.json"
    if not described.is_file():
        raise FileNotFoundError(f"{directory} has neither config.json nor adapter_config.json: it is no model")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no safetensors file")
    stamps = tuple(_stamp(file) for file in (described, *files))
    settled = time.time() - max(stamp.modified_ns for stamp in stamps) / 1e9 > SETTLED_S
    return (_contents if settled else _contents.__wrapped__)(stamps)


class _Stamp(NamedTuple):
    file: Path
    modified_ns: int
    size: int
    node: int


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return _Stamp(file.absolute(), status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=64)
def _contents(stamps: tuple[_Stamp, ...]) -> Contents:
    described, files = stamps[0].file, [stamp.file for stamp in stamps[1:]]
    config = read_json(described)
    digest = hashlib.sha256(_canonical({k: v for k, v in config.items() if k not in BESIDE}))
    tensors = [entry for file in files for entry in _entries(file)]
    for entry in sorted(tensors, key=lambda e: e.name):
        digest.update(f"\n{entry.name} {entry.dtype} {list(entry.shape)}\n".encode())
        _update(digest, entry)
    parameters = sum(math.prod(entry.shape) for entry in tensors)
    size = sum(entry.end - entry.start for entry in tensors)
    base = str(config.get("base_model_name_or_path") or "") if described.name == ADAPTER else ""
    return Contents(digest.hexdigest(), parameters, size, base)


def joined(*hashes: str) -> str:
    """The hash of an adapter on its base."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def adds_nothing(adapter: Path | str) -> bool:
    """Whether a LoRA adapter leaves its model as it is: its scale or every product of its factors is 0.

    Ends at the first that is not. Raises what `read_contents` does.
    """
    adapter = Path(adapter)
    if read_json(adapter / ADAPTER).get("lora_alpha") == 0:
        return True
    entries = [entry for file in sorted(adapter.glob("*.safetensors")) for entry in _entries(file)]
    pairs: dict[str, list[_Entry]] = collections.defaultdict(list)
    for entry in sorted(entries, key=lambda e: e.name):  # lora_A before lora_B
        pairs[entry.name.replace(".lora_B.", ".lora_A.")].append(entry)
    return not any(_product(pair).any() for pair in pairs.values())


def _product(pair: list[_Entry]) -> np.ndarray:
    """[..., out, in] of lora_A and lora_B; a tensor without a counterpart as it is."""
    first, *rest = (_tensor(entry) for entry in pair)
    return rest[0] @ first if rest else first


def _tensor(entry: _Entry) -> np.ndarray:
    with safe_open(entry.file, framework="np") as tensors:
        return np.asarray(tensors.get_tensor(entry.name), np.float32)


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int  # bytes of the file
    end: int


def _entries(file: Path) -> list[_Entry]:
    """The tensors of a safetensors file: eight bytes with the header's length, the header, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"{file} is not a whole safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    at = 8 + length
    found = [
        _Entry(name, e["dtype"], tuple(e["shape"]), file, at + e["data_offsets"][0], at + e["data_offsets"][1])
        for name, e in header.items()
    ]
    if found and max(e.end for e in found) > size:
        raise ValueError(f"{file} is cut short: {size} bytes of {max(e.end for e in found)}")
    return found


def _update(digest: Any, entry: _Entry) -> None:
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        left = entry.end - entry.start
        while left:
            chunk = stream.read(min(left, CHUNK))
            if not chunk:
                raise ValueError(f"{entry.file} became shorter while it was read")
            digest.update(chunk)
            left -= len(chunk)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
