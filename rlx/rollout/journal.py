"""A journal of finished groups, so that a run that is killed loses none of them.

Append-only segments, `<sequence>.journal`, each written by one process between two checkpoints. A checkpoint's host
state holds the sequence number of the segment that begins with it: what is to be replayed after a restore is that
segment and all later ones. A segment begins with 8 bytes, "rlxjrnl" and the format's number, then come frames:

    uint32 length of the record, uint32 CRC-32 of the record, the record (`rlx.rollout.records`)

A record is {"number": of the group, "generated": [tokens, samples, groups] of the ledger at that moment, "group": ...}.
What follows the last whole frame of a segment is the torn end of a write and is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rlx.rollout.records import chunks, group_tree, read_group, unpack
from rlx.types import Count, Group

FORMAT = 1
_MAGIC = b"rlxjrnl" + bytes([FORMAT])
_FRAME = struct.Struct("<II")


class JournalError(RuntimeError):
    """A file that is no journal of this format."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    number: int  # of the group
    generated: Count  # everything generated so far, this group included
    group: Group


class Journal:
    """Writes a segment of its own, after those that are there.

    A record has left the process when `append` returns: it outlives the process, and the machine after `sync`.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.sequence = 1 + max((number for number, _ in segments(directory)), default=-1)
        self._file = self._open()

    def append(self, entry: Entry) -> None:
        pieces = chunks({"number": entry.number, "generated": list(entry.generated), "group": group_tree(entry.group)})
        checksum = functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
        self._file.write(_FRAME.pack(sum(map(len, pieces)), checksum))
        self._file.writelines(pieces)
        self._file.flush()

    def rotate(self) -> int:
        """Begin a segment; returns its number, which belongs into the checkpoint of this moment."""
        self.close()
        self.sequence += 1
        self._file = self._open()
        return self.sequence

    def prune(self, sequence: int) -> None:
        """The oldest checkpoint that is kept begins with segment `sequence`: those before it are of no use."""
        for number, path in segments(self.directory):
            if number < sequence:
                path.unlink()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _open(self) -> IO[bytes]:
        file = (self.directory / f"{self.sequence}.journal").open("xb")
        file.write(_MAGIC)
        file.flush()
        return file


def segments(directory: Path) -> list[tuple[int, Path]]:
    """(sequence number, file), in order."""
    return sorted((int(path.stem), path) for path in directory.glob("*.journal") if path.stem.isdigit())


def read(directory: Path, sequence: int) -> Iterator[Entry]:
    """The groups of segment `sequence` and of all later ones, in order.

    Raises JournalError for a file of another format.
    """
    for number, path in segments(directory):
        if number >= sequence:
            for record in _records(path):
                tree = unpack(record)
                yield Entry(tree["number"], Count(*tree["generated"]), read_group(tree["group"]))


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC[: len(magic)]:
            raise JournalError(f"{path} is no journal of format {FORMAT}: it begins with {magic!r}")
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(head)
            record = file.read(length)
            if len(record) < length or zlib.crc32(record) != checksum:
                return
            yield record
