"""Files that survive a kill: JSON replaced atomically, JSONL appended to and cut back.

Numbers that JSON does not have are written as the texts "NaN", "Infinity" and "-Infinity", as protobuf's JSON mapping
does, so that every reader of JSON can read the files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def encode(value: Any, indent: int | None = None) -> str:
    """JSON of mappings, sequences, numpy numbers and arrays, paths and plain values.

    Raises:
      TypeError: for any other type.
    """
    try:
        # Nearly all records hold plain values: to walk through them in Python takes seven times as long.
        return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent, default=_foreign)
    except (ValueError, TypeError):
        return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` at once: a reader sees the old or the new content, also after a crash."""
    _replace(path, (encode(value, indent=2) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_json`, for any content."""
    _replace(path, content)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records of a file, and the number of torn last lines (0 or 1) that a kill left behind.

    Raises:
      ValueError: for a line before the last that is not a JSON object: the file was damaged otherwise.
    """
    lines, torn = _whole_lines(path)
    return [json.loads(line) for line in lines], torn


class JsonlWriter:
    """Appends records to a file, one line each. A record is with the kernel when `append` returns.

    `count` is the number of records in the file, `torn` of torn last lines (0 or 1) that were dropped on opening.

    Raises:
      ValueError: on opening a file with a damaged line before the last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        lines, self.torn = _whole_lines(path) if path.exists() else ([], 0)
        self.count = len(lines)
        if self.torn:
            _replace(path, b"".join(lines))
        self._file = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record, which has its update under the key "update".

        Raises:
          ValueError: without that key.
        """
        if not isinstance(record.get("update"), int):
            raise ValueError(f"a record of {self.path.name} needs a whole number 'update', got keys {sorted(record)}")
        self._file.write(encode(record).encode() + b"\n")
        self._file.flush()
        self.count += 1

    def keep(self, count: int) -> int:
        """Drops all records but the first `count` and returns how many they were."""
        dropped = self.count - count
        if dropped > 0:
            lines, _ = _whole_lines(self.path)
            self._file.close()
            _replace(self.path, b"".join(lines[:count]))
            self._file = self.path.open("ab")
            self.count = count
        return dropped

    def sync(self) -> None:
        """Forces what was appended to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _foreign(value: Any) -> Any:
    """What JSON does not know, in its types."""
    plain = _plain(value)
    if plain is value:
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The lines that hold a record, and the number of torn last lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    for index, line in enumerate(lines):
        if line.endswith(b"\n") and _is_record(line):
            continue
        if index + 1 < len(lines):
            raise ValueError(f"{path}:{index + 1}: not a JSON object, and not the last line: the file is damaged")
        return lines[:-1], 1
    return lines, 0


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _replace(path: Path, content: bytes) -> None:
    """Writes beside `path`, forces to disk, renames over it. The name is fixed: a kill leaves one file at most."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)
