"""The checksum of a GPU's tensors, against SGLang's own kernel as Triton's interpreter runs it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rlx.sync import cuda_checksum
from rlx.sync.cuda_checksum import TILE

# Of arange(n) * 0.37 - 1 in float32, by hash_tiles32_kernel_blocked and what follows it in SGLang 0.5.23.
KERNEL = {
    1: "38ec9d3d4b492dda",
    5: "295e93cbc4ce8760",
    257: "a19f74c18f907d48",
    8192: "2e107847fae07ca7",
    20000: "d74fdfcf91a9846d",
}
BFLOAT16_7 = "749fd6b4a5671bf0"


def content(count, dtype=np.float32):
    numbers = np.arange(count, dtype=np.float32) * np.float32(0.37) - np.float32(1)
    return numbers.astype(dtype).view(np.uint8)


def checksum(*parts):
    return cuda_checksum.cuda_checksum(parts)


@pytest.mark.parametrize("count", KERNEL)
def test_the_kernels_own_checksums(count):
    assert checksum(content(count)) == KERNEL[count]


def test_bytes_that_are_no_whole_number_of_words_are_filled_with_zeros():
    assert checksum(content(7, ml_dtypes.bfloat16)) == BFLOAT16_7


def test_parts_are_one_tensor_and_chunks_make_no_difference(monkeypatch):
    whole = content(20000)
    assert checksum(whole[:5000], whole[5000:]) == KERNEL[20000]
    monkeypatch.setattr(cuda_checksum, "CHUNK", TILE)
    assert checksum(whole) == KERNEL[20000]


def test_a_word_in_another_place_is_another_tensor():
    words = content(20000).view(np.uint32).copy()
    words[[3, 12000]] = words[[12000, 3]]
    assert checksum(words.view(np.uint8)) != KERNEL[20000]
