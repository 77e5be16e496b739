"""Attention of parts that have shape against attention of whole rows, value and gradient, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models.family_attention import family_attention, mask
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention
from rlx.types import RowShape
from tests.models.packed_rows import TOKENS, attended, largest_difference, random_arrays, within_rounding

# Beginnings as long as a sample's own part and shorter; many samples, and one alone.
SHAPES = [RowShape(8, 2), RowShape(3, 3), RowShape(4, 5), RowShape(9, 1)]


def laid_out(shape: RowShape, rows: int = 2) -> Ids:
    """Samples of every length from the whole place down to none, behind beginnings that leave room, or none."""
    own = shape.own_tokens(TOKENS)
    positions, segments, prefixes = (np.zeros((rows, TOKENS), np.int32) for _ in range(3))
    for row in range(rows):
        prefix = shape.prefix - row
        segments[row, :prefix], positions[row, :prefix] = 1, np.arange(prefix)
        for number in range(shape.samples):
            count = max(own - (row + 1) * number, 0)
            span = slice(start := shape.prefix + number * own, start + count)
            segments[row, span], prefixes[row, span] = 2 + number, 1
            positions[row, span] = prefix + np.arange(count)
    return Ids(*(jnp.asarray(x) for x in (positions, segments, prefixes)))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradient_are_those_of_whole_rows(shape, window):
    ids = laid_out(shape)
    with jax.enable_x64(True):
        arrays = random_arrays(kv_heads=2)
        ours = attended(lambda *x: family_attention(shape, *x, mask(shape, ids, window)), arrays)
        wanted = attended(lambda *x: packed_attention(*x, visible(ids, ids, window)), arrays)
    assert ours[0].dtype == jnp.float64
    assert largest_difference(ours, wanted) < 1e-14
    assert not np.asarray(ours[0])[np.asarray(ids.segments) == 0].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_as_close_to_float32_as_whole_rows_are(shape):
    ids = laid_out(shape)
    ours = lambda *x: family_attention(shape, *x, mask(shape, ids, None))  # noqa: E731
    assert within_rounding(ours, lambda *x: packed_attention(*x, visible(ids, ids, None)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_padding_holds_changes_nothing(shape):
    ids = laid_out(shape)
    padding = (ids.segments == 0)[:, :, None, None]
    assert padding.any()
    arrays = random_arrays(kv_heads=6)
    poisoned = tuple(jnp.where(padding, 1e30, x) for x in arrays)
    attention = lambda *x: family_attention(shape, *x, mask(shape, ids, None))  # noqa: E731
    for clean, dirty in zip(attended(attention, arrays), attended(attention, poisoned), strict=True):
        np.testing.assert_array_equal(np.where(padding, 0, clean), np.where(padding, 0, dirty))


@pytest.mark.parametrize("shape", [RowShape(0, 2), RowShape(TOKENS, 1), RowShape(8, 3), RowShape(10, 2)], ids=str)
def test_rows_that_cannot_be_cut_so_are_refused(shape):
    with pytest.raises(ValueError, match=f"rows of {TOKENS} tokens cannot hold a beginning of {shape.prefix}"):
        mask(shape, laid_out(SHAPES[0]), None)
