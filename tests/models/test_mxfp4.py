"""MXFP4 weights against a decoder written out bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.models.mxfp4 import dequantise


def decoded(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 8 else 1, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_code_and_scale():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (3, 5, 32), dtype=np.uint8)
    scale = rng.integers(1, 250, (3, 5, 2), dtype=np.uint8)
    got = dequantise(packed, scale)
    assert got.shape == (3, 5, 64)
    assert got.dtype == np.float32
    for index in np.ndindex(3, 5, 64):
        byte = int(packed[index[0], index[1], index[2] // 2])
        code = byte & 15 if index[2] % 2 == 0 else byte >> 4
        assert got[index] == np.float32(decoded(code) * 2.0 ** (int(scale[index[0], index[1], index[2] // 32]) - 127))


@pytest.mark.parametrize(
    "packed, scale, message",
    [
        (np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8), r"holds 32 columns, which takes scales \(2, 1.0\)"),
        (np.zeros((2, 12), np.uint8), np.zeros((2, 1), np.uint8), "holds 24 columns"),
        (np.zeros((2, 16), np.uint8), np.full((2, 1), 255, np.uint8), "a scale is 255"),
    ],
)
def test_what_does_not_fit_is_refused(packed, scale, message):
    with pytest.raises(ValueError, match=message):
        dequantise(packed, scale)
