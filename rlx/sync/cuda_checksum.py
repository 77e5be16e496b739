"""The checksum that SGLang 0.5.23 reports of a tensor that lies on a GPU.

Each 32-bit word is mixed with its place, in two ways; the sums over tiles of 8,192 words are mixed again and make the
halves of a 64-bit number a tile; the sum of these is mixed a last time. The mixers are those of MurmurHash3 (32 bits)
and of SplitMix64. A word in another place, or in another tensor, counts as another word.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

TILE = 8192  # words
CHUNK = 512 * TILE  # words that are hashed at once
_SEEDS = 0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF
_PLACES = 0x27D4EB2D, 0x165667B1  # multipliers of a word's place
_ROTATIONS = 15, 13


def cuda_checksum(parts: Sequence[np.ndarray]) -> str:
    """16 hexadecimal digits, of the bytes of `parts` (uint8, 1-D) one behind the other."""
    content = parts[0] if len(parts) == 1 else np.concatenate(parts)
    words = np.pad(content, (0, -len(content) % 4)).view(np.uint32)
    total = 0
    for first in range(0, len(words), CHUNK):
        chunk = words[first : first + CHUNK]
        tiles = -(-len(chunk) // TILE)
        padded = np.pad(chunk, (0, CHUNK - len(chunk)))
        high, low = _tiles(
            padded, np.uint32(first & 0xFFFFFFFF), np.uint32(len(chunk)), np.uint32(4 * len(words) % 2**32)
        )
        sums = (np.asarray(high, np.uint64) << np.uint64(32)) | np.asarray(low, np.uint64)
        total += int(sums[:tiles].sum(dtype=np.uint64))
    return f"{_finish(total % 2**64):016x}"


@jax.jit
def _tiles(
    words: UInt32[Array, " n"], first: UInt32[Array, ""], count: UInt32[Array, ""], nbytes: UInt32[Array, ""]
) -> tuple[UInt32[Array, " tiles"], UInt32[Array, " tiles"]]:
    """The two halves of each tile; words from `count` on do not exist. `first`: the place of words[0]."""
    index = jnp.arange(len(words), dtype=jnp.uint32)
    halves = tuple(
        _half(words, index + first, index < count, seed, multiplier, rotation) ^ nbytes
        for seed, multiplier, rotation in zip(_SEEDS, _PLACES, _ROTATIONS, strict=True)
    )
    return _mix(halves[0]), _mix(halves[1])


def _half(words: Array, place: Array, there: Array, seed: int, multiplier: int, rotation: int) -> Array:
    rotated = (place << rotation) | (place >> (32 - rotation))
    salt = (place * jnp.uint32(multiplier) + jnp.uint32(seed)) ^ rotated
    mixed = jnp.where(there, _mix(words ^ salt), jnp.uint32(0))
    return mixed.reshape(-1, TILE).sum(1, dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3 for 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _finish(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
