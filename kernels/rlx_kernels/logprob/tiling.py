"""Loops over tiles of the logits: blocks of the vocabulary, chunks of tokens; here the head is not padded or copied.

(The Mosaic kernels copy a head whose rows are no multiple of 16, or fewer than 256, to pad it.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


class Tile(NamedTuple):
    """How many logits are alive at once."""

    tokens: int
    columns: int


def over_blocks(total: int, size: int, body: Callable[[Any, int, Any], Any], carry: Any) -> Any:
    """carry after body(start, count, carry) over [0, total): blocks of `size`, then what is left, of its own size.

    `count` is static, and `start` too where there is one block only.
    """
    if total <= size:
        return body(0, total, carry)
    whole = total // size
    carry = lax.fori_loop(0, whole, lambda i, c: body(i * size, size, c), carry)
    return body(whole * size, total - whole * size, carry) if total % size else carry


def even_columns(vocab: int, most: int) -> int:
    """A block size of at most `most`, an equal part of the vocabulary where one is at least half of that.

    What is left over is one more program, and XLA copies the head's gradient between the two.
    """
    fewest = -(-vocab // most)
    parts = [n for n in range(fewest, 2 * fewest) if vocab % (8 * n) == 0]
    return vocab // parts[0] if parts else min(most, vocab)


def rows(x: Shaped[Array, "rows ..."], start: Int[Array, ""] | int, count: int) -> Shaped[Array, "{count} ..."]:
    return x if count == x.shape[0] else lax.dynamic_slice_in_dim(x, start, count, 0)


def put_rows(
    x: Shaped[Array, " rows *rest"], update: Shaped[Array, " count *rest"], start: Int[Array, ""] | int
) -> Shaped[Array, " rows *rest"]:
    update = update.astype(x.dtype)
    return update if update.shape == x.shape else lax.dynamic_update_slice_in_dim(x, update, start, 0)


def columns_within(ids: Int[Array, "..."], start: Int[Array, ""] | int, count: int) -> Int[Array, "..."]:
    """ids - start inside of a block, `count` outside, which gathers fill and scatters drop."""
    local = ids - start
    return jnp.where((local >= 0) & (local < count), local, count)


def in_chunks(size: int, tree: Any) -> Any:
    """Every [T, ...] as [N, C, ...] with C at most `size`: equal chunks, fewer than N rows of zeros at the end."""

    def split(x):
        tokens = x.shape[0]
        chunks = -(-tokens // size)
        length = -(-tokens // chunks)
        padded = jnp.pad(x, ((0, chunks * length - tokens), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(chunks, length, *x.shape[1:])

    return jax.tree.map(split, tree)


def flat(x: Shaped[Array, " chunks size *rest"], tokens: int) -> Shaped[Array, " {tokens} *rest"]:
    """Undoes `in_chunks`."""
    return x.reshape(-1, *x.shape[2:])[:tokens]


def varying(*arrays: jax.Array) -> tuple[str, ...]:
    """The manual mesh axes over which any of the arrays varies, as shard_map tracks them."""
    return tuple(sorted({axis for x in arrays for axis in jax.typeof(x).manual_axis_type.varying}))


def full(shape: tuple[int, ...], value: float, axes: tuple[str, ...], dtype: Any = jnp.float32) -> jax.Array:
    """A constant that a loop may replace by arrays that vary over `axes`."""
    constant = jnp.full(shape, value, dtype)
    return lax.pcast(constant, axes, to="varying") if axes else constant
