"""The checksums that a server of one rank reports when it serves a staged version, from the version's files.

On a CPU the first 8 bytes of a SHA-256, on a GPU a hash of SGLang's own (`rlx.sync.cuda_checksum`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.sync.cuda_checksum import cuda_checksum
from rlx.sync.manifest import ITEMSIZE, SERVED_DIGITS, Entry
from rlx.sync.naming import served_layout_unsupported_reason, served_parts, served_shape

Bytes = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A tensor of a checkpoint: its name, its shape and its bytes, which are contiguous."""

    name: str
    shape: tuple[int, ...]
    content: Bytes


def served_checksum(parts: Sequence[Part], device: str) -> str:
    """Of the served tensor that is made of `parts`, first rows first. `device`: cpu or cuda."""
    contents = [padded(p.content, p.shape, served_shape(p.name, p.shape, device)) for p in parts]
    if device == "cuda":
        return cuda_checksum(contents)
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content.data)
    return digest.hexdigest()[:SERVED_DIGITS]


def served_checksums(
    directory: Path, entries: Mapping[str, Entry], dtype: str, device: str, pool: ThreadPoolExecutor | None
) -> dict[str, str]:
    """By the served tensors' names; {} where the layout of this model is not known. `device`: cpu or cuda."""
    if served_layout_unsupported_reason(entries) is not None:
        return {}
    files = {entry.file: np.memmap(directory / entry.file, np.uint8, "r") for entry in entries.values()}

    def part(name: str) -> Part:
        entry = entries[name]
        end = entry.offset + ITEMSIZE[dtype] * int(np.prod(entry.shape))
        return Part(name, entry.shape, files[entry.file][entry.offset : end])

    def checksum(names: Sequence[str]) -> str:
        return served_checksum([part(name) for name in names], device)

    parts = served_parts(entries)
    each = map if pool is None else pool.map
    return dict(zip(parts, each(checksum, parts.values())))


def padded(content: Bytes, shape: tuple[int, ...], served: tuple[int, ...]) -> Bytes:
    """Bytes of a tensor of `shape` with zeros behind its rows and columns, up to `served`."""
    if served == shape:
        return content
    rows = content.reshape(shape[0], -1)
    columns = rows.shape[1] // shape[-1] * served[-1]
    return np.pad(rows, ((0, served[0] - shape[0]), (0, columns - rows.shape[1]))).reshape(-1)
