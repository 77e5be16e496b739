"""What is sent as torch's pickle is read by a reader that knows only the names that a server admits."""

from __future__ import annotations

import collections
import io
import pickle
import struct

import numpy as np
import pytest

from rlx.sync.torch_pickle import named_tensors, tensors_by_name

TYPES = {"FloatStorage": np.float32, "BFloat16Storage": np.uint16, "HalfStorage": np.float16}


class StorageReader(pickle.Unpickler):
    """Of the part of torch's older file that says what the storage is."""

    def find_class(self, module, name):
        assert module == "torch"
        return TYPES[name]

    def persistent_load(self, key):
        return key


class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return {
            ("torch.storage", "_load_from_bytes"): load_storage,
            ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            ("collections", "OrderedDict"): collections.OrderedDict,
        }[module, name]


def load_storage(content):
    stream = io.BytesIO(content)
    magic, protocol, system = [pickle.Unpickler(stream).load() for _ in range(3)]
    assert (magic, protocol, system["little_endian"]) == (0x1950A86A20F9469CFC6C, 1001, True)
    kind, dtype, key, location, count, view = StorageReader(stream).load()
    assert (kind, location, view) == ("storage", "cpu", None)
    assert pickle.Unpickler(stream).load() == [key]
    assert struct.unpack("<q", stream.read(8)) == (count,)
    return np.frombuffer(stream.read(), dtype)


def rebuild(storage, offset, size, stride, requires_grad, hooks):
    assert (requires_grad, hooks) == (False, {})
    strides = tuple(s * storage.itemsize for s in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_come_back_with_names_shapes_and_values(dtype):
    kind = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[dtype]
    tensors = {"a.weight": np.arange(6).reshape(2, 3), "b": np.arange(5), "é": np.arange(8).reshape(2, 2, 2)}
    tensors = {name: x.astype(kind) for name, x in tensors.items()}
    data = b"".join(x.tobytes() for x in tensors.values())
    firsts = np.cumsum([0, *(x.size for x in tensors.values())]).tolist()
    placed = [(name, first, x.shape) for (name, x), first in zip(tensors.items(), firsts)]
    read = Reader(io.BytesIO(named_tensors(data, dtype, placed))).load()
    assert [name for name, _ in read] == list(tensors)
    for name, found in [
        *read,
        *Reader(io.BytesIO(tensors_by_name(data, dtype, {n: p for n, *p in placed}))).load().items(),
    ]:
        np.testing.assert_array_equal(found, tensors[name])


def test_bytes_that_are_no_whole_number_of_values_are_refused():
    with pytest.raises(ValueError, match="7 bytes"):
        named_tensors(b"1234567", "float32", [])
