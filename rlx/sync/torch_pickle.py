"""The bytes that torch unpickles as named tensors, written without torch: what SGLang takes as an HTTP body.

A list of (name, tensor), or a dict, whose tensors are views of one storage: `torch._utils._rebuild_tensor_v2` of a
storage that `torch.storage._load_from_bytes` reads from the older of torch's two file formats. Data travels in the
bytes themselves, so it serves every rank and every host alike. The reader admits no other globals than torch's own.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Mapping, Sequence

STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage"}
_MAGIC, _FORMAT = 0x1950A86A20F9469CFC6C, 1001  # of torch's file format before it became a zip archive
_SYSTEM = {"protocol_version": _FORMAT, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
_KEY = "0"
_STORAGE = b"\xff"  # the memo's place of the storage; pickled values below use the first few


def named_tensors(data: bytes, dtype: str, placed: Sequence[tuple[str, int, tuple[int, ...]]]) -> bytes:
    """A list of (name, tensor). `placed` has each one's (name, first element in `data`, shape); rows lie in order."""
    pairs = b"".join(_value(name) + _tensor(first, shape) + pickle.TUPLE2 for name, first, shape in placed)
    return _with_storage(data, dtype, pickle.EMPTY_LIST + pickle.MARK + pairs + pickle.APPENDS)


def tensors_by_name(data: bytes, dtype: str, placed: Mapping[str, tuple[int, tuple[int, ...]]]) -> bytes:
    """The same as a dict, as SGLang takes an adapter's."""
    pairs = b"".join(_value(name) + _tensor(first, shape) for name, (first, shape) in placed.items())
    return _with_storage(data, dtype, pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS)


def _with_storage(data: bytes, dtype: str, value: bytes) -> bytes:
    stored = _storage_file(data, dtype)
    head = pickle.PROTO + b"\x04" + _name("torch.storage", "_load_from_bytes")
    head += pickle.BINBYTES8 + struct.pack("<Q", len(stored))
    memoized = pickle.TUPLE1 + pickle.REDUCE + pickle.BINPUT + _STORAGE + pickle.POP
    return b"".join((head, stored, memoized, value, pickle.STOP))


def _storage_file(data: bytes, dtype: str) -> bytes:
    itemsize = 4 if dtype == "float32" else 2
    count, rest = divmod(len(data), itemsize)
    if rest:
        raise ValueError(f"{len(data)} bytes are no whole number of {dtype} values")
    kind = pickle.PROTO + b"\x02" + pickle.MARK + _value("storage") + _name("torch", STORAGES[dtype])
    kind += _value(_KEY) + _value("cpu") + _value(count) + pickle.NONE + pickle.TUPLE + pickle.BINPERSID + pickle.STOP
    parts = (pickle.dumps(_MAGIC, 2), pickle.dumps(_FORMAT, 2), pickle.dumps(_SYSTEM, 2), kind, pickle.dumps([_KEY], 2))
    return b"".join((*parts, struct.pack("<q", count), data))


def _tensor(first: int, shape: tuple[int, ...]) -> bytes:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    arguments = pickle.BINGET + _STORAGE + _value(first) + _value(shape) + _value(strides) + pickle.NEWFALSE
    hooks = _name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    made = _name("torch._utils", "_rebuild_tensor_v2") + pickle.MARK + arguments + hooks + pickle.TUPLE + pickle.REDUCE
    return made


def _name(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _value(value: object) -> bytes:
    """A plain value without the frame around it."""
    return pickle.dumps(value, 2)[2:-1]
