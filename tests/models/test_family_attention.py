"""Attention of parts that have places against attention of whole rows, value and gradient, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models.family_attention import family_attention, mask
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention
from rlx.types import RowPlaces
from tests.models.packed_rows import TOKENS, attended, largest_difference, random_arrays

# Beginnings as long as a sample's place, shorter, longer, and longer than two of them; one sample alone.
PLACES = [RowPlaces(8, 2), RowPlaces(3, 3), RowPlaces(10, 2), RowPlaces(15, 3), RowPlaces(20, 1)]


def laid_out(places: RowPlaces, rows: int = 2) -> Ids:
    """Samples of every length from the whole place down to none, behind beginnings that leave room, or none."""
    own = places.own_tokens(TOKENS)
    positions, segments, prefixes = (np.zeros((rows, TOKENS), np.int32) for _ in range(3))
    for row in range(rows):
        prefix = places.prefix - row
        segments[row, :prefix], positions[row, :prefix] = 1, np.arange(prefix)
        for number in range(places.samples):
            count = max(own - (row + 1) * number, 0)
            span = slice(start := places.prefix + number * own, start + count)
            segments[row, span], prefixes[row, span] = 2 + number, 1
            positions[row, span] = prefix + np.arange(count)
    return Ids(*(jnp.asarray(x) for x in (positions, segments, prefixes)))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_value_and_gradient_are_those_of_whole_rows(places, window):
    ids = laid_out(places)
    with jax.enable_x64(True):
        arrays = random_arrays(kv_heads=2)
        ours = attended(lambda *x: family_attention(places, *x, mask(places, ids, window)), arrays)
        wanted = attended(lambda *x: packed_attention(*x, visible(ids, ids, window)), arrays)
    assert ours[0].dtype == jnp.float64
    assert largest_difference(ours, wanted) < 1e-14
    assert not np.asarray(ours[0])[np.asarray(ids.segments) == 0].any()


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_what_padding_holds_changes_nothing(places):
    ids = laid_out(places)
    padding = (ids.segments == 0)[:, :, None, None]
    assert padding.any()
    arrays = random_arrays(kv_heads=6)
    poisoned = tuple(jnp.where(padding, 1e30, x) for x in arrays)
    attention = lambda *x: family_attention(places, *x, mask(places, ids, None))  # noqa: E731
    for clean, dirty in zip(attended(attention, arrays), attended(attention, poisoned), strict=True):
        np.testing.assert_array_equal(np.where(padding, 0, clean), np.where(padding, 0, dirty))


@pytest.mark.parametrize("places", [RowPlaces(0, 2), RowPlaces(TOKENS, 1), RowPlaces(8, 3)], ids=str)
def test_rows_that_cannot_be_cut_so_are_refused(places):
    with pytest.raises(ValueError, match=f"rows of {TOKENS} tokens cannot have a beginning of {places.prefix}"):
        mask(places, laid_out(PLACES[0]), None)
