"""Groups and states as bytes: plain values as JSON, arrays as they lie in memory.

    uint32 length of the JSON text, the JSON text, the arrays' bytes end to end

An array stands in the JSON as {"array": [dtype, shape, offset, nbytes]}; all numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.types import Group, Sample, StopReason, Task, TopK, VersionSpan


class RecordError(ValueError):
    """Bytes that are no record."""


def chunks(tree: Any) -> list[bytes | memoryview]:
    """A tree of dicts with string keys, lists, arrays and what JSON can hold, as the pieces of its record.

    Arrays are not copied.
    """
    arrays: list[memoryview] = []
    offset = 0

    def plain(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, np.ndarray):
            little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            place = {"array": [little.dtype.str, list(value.shape), offset, little.nbytes]}
            arrays.append(memoryview(little.reshape(-1).view(np.uint8)))
            offset += little.nbytes
            return place
        if isinstance(value, Mapping):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        return value

    text = json.dumps(plain(tree), ensure_ascii=False).encode()
    return [struct.pack("<I", len(text)), text, *arrays]


def pack(tree: Any) -> bytes:
    return b"".join(chunks(tree))


def unpack(data: bytes) -> Any:
    """What `pack` was given; tuples are lists. Raises RecordError."""
    try:
        (size,) = struct.unpack_from("<I", data)
        tree, body = json.loads(data[4 : 4 + size]), memoryview(data)[4 + size :]

        def whole(value: Any) -> Any:
            if isinstance(value, list):
                return [whole(v) for v in value]
            if not isinstance(value, dict):
                return value
            if value.keys() == {"array"}:
                dtype, shape, offset, nbytes = value["array"]
                return np.frombuffer(body[offset : offset + nbytes], dtype).reshape(shape).copy()
            return {key: whole(v) for key, v in value.items()}

        return whole(tree)
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{len(data)} bytes are no record: {error}") from error


def group_tree(group: Group) -> dict[str, Any]:
    """A group as `pack` takes it; its task once."""
    return {"task": task_tree(group.task), "samples": [sample_tree(s) for s in group.samples]}


def read_group(tree: Mapping[str, Any]) -> Group:
    task = read_task(tree["task"])
    return Group(task, tuple(read_sample(task, s) for s in tree["samples"]))


def task_tree(task: Task) -> dict[str, Any]:
    return {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}


def read_task(tree: Mapping[str, Any]) -> Task:
    return Task(**tree)


def sample_tree(sample: Sample) -> dict[str, Any]:
    """Without its task."""
    head = None if sample.head is None else {"ids": sample.head.ids, "logprobs": sample.head.logprobs}
    return {
        "group": sample.group,
        "index": sample.index,
        "tokens": sample.tokens,
        "mask": sample.mask,
        "logprobs": sample.logprobs,
        "head": head,
        "version_spans": [[s.version, s.start, s.end] for s in sample.version_spans],
        "stop_reason": sample.stop_reason.value,
        "text": sample.text,
        "reward": sample.reward,
        "grade": dict(sample.grade),
        "routes": sample.routes,
    }


def read_sample(task: Task, tree: Mapping[str, Any]) -> Sample:
    head = tree["head"]
    read = {
        "head": None if head is None else TopK(head["ids"], head["logprobs"]),
        "version_spans": tuple(VersionSpan(*s) for s in tree["version_spans"]),
        "stop_reason": StopReason(tree["stop_reason"]),
    }
    return Sample(**{**tree, **read, "task": task})
