"""What a staged version consists of: each tensor's file, place, shape and checksum, and what a server should report.

A tensor's checksum is its XXH3 of 128 bits. A server on a CPU reports the first 8 bytes of the SHA-256 of each tensor
that it serves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.models.files import read_json, write_json

FILE = "manifest.json"
# numpy's (and ml_dtypes') names -> those of a safetensors header
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
SERVED_DIGITS = 16  # hexadecimal, of a served tensor's checksum
MAX_NAMED = 4  # names in a message


class StagingError(ValueError):
    """A version that must not reach an engine: what is wrong with it, and where."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor as it lies in `file`."""

    file: str
    offset: int  # bytes, from the beginning of the file
    shape: tuple[int, ...]
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Of one version, in the dtype that it travels in."""

    version: int
    dtype: str
    files: Mapping[str, int]  # name -> bytes, in the order in which they are sent
    tensors: Mapping[str, Entry]  # by the checkpoint's name, in the order in which they lie in their file
    served: Mapping[str, str]  # what a server of one rank on a CPU reports; {}: its layout is not known, or not asked

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def names(self, file: str) -> list[str]:
        return [name for name, entry in self.tensors.items() if entry.file == file]

    def digests(self) -> dict[str, str]:
        """A digest of each file's contents by its name: equal digests, equal tensors."""
        found: dict[str, Any] = {file: hashlib.sha256() for file in self.files}
        for name, entry in self.tensors.items():
            found[entry.file].update(f"{name} {self.dtype} {entry.shape} {entry.checksum}\n".encode())
        return {file: digest.hexdigest() for file, digest in found.items()}

    def write(self, directory: Path) -> None:
        write_json(directory / FILE, dataclasses.asdict(self))


def read_manifest(directory: Path) -> Manifest:
    """Raises StagingError where there is none, or none that can be read."""
    try:
        value = read_json(directory / FILE)
        tensors = {name: Entry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in value["tensors"].items()}
        return Manifest(**{**value, "tensors": tensors})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StagingError(f"{directory} holds no staged version: {error}") from error


def header(manifest_dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """What a safetensors file begins with when these tensors follow in this order, without gaps."""
    offset, entries = 0, {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = offset + ITEMSIZE[manifest_dtype] * _size(shape)
        entries[name] = {"dtype": TYPES[manifest_dtype], "shape": list(shape), "data_offsets": [offset, end]}  # type: ignore[dict-item]
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


def check_files(directory: Path, manifest: Manifest, files: Sequence[str] | None = None) -> None:
    """Raises StagingError where what lies in `directory` is not what the manifest says, as far as headers tell.

    Cheap: a server that is sent a tensor of another shape ends with an error of its own, so none must be sent.
    """
    for file in manifest.files if files is None else files:
        path = directory / file
        shapes = {name: manifest.tensors[name].shape for name in manifest.names(file)}
        wanted = header(manifest.dtype, shapes)
        try:
            size = path.stat().st_size
            with path.open("rb") as stream:
                found = stream.read(len(wanted))
        except OSError as error:
            raise StagingError(f"{path} cannot be read: {error.strerror}") from error
        if size != manifest.files[file]:
            raise StagingError(f"{path} has {size} bytes, {manifest.files[file]} were staged")
        if found != wanted:
            raise StagingError(f"{path} does not hold the tensors that were staged: {_difference(found, shapes)}")


def _difference(found: bytes, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a header has in place of what it should have."""
    try:
        length = struct.unpack("<Q", found[:8])[0]
        there = json.loads(found[8 : 8 + length])
    except (struct.error, ValueError):
        return "its header is damaged"
    there.pop("__metadata__", None)
    lacks, extra = [n for n in shapes if n not in there], [n for n in there if n not in shapes]
    if lacks or extra:
        return f"it lacks {lacks[:MAX_NAMED]} and has {extra[:MAX_NAMED]}"
    other = next((n for n in shapes if tuple(there[n]["shape"]) != shapes[n]), None)
    if other is not None:
        return f"{other} has shape {there[other]['shape']}, not {list(shapes[other])}"
    return f"types or places differ, first {next(iter(there), 'nothing')}"


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
