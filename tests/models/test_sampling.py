"""Drawing tokens: the inverse CDF against exact counts, log-probs and heads against float64, streams of randomness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rlx.models.sampling import draw, inverse_cdf

LARGEST_BELOW_ONE = np.float32(1 - 2**-24)
pick = jax.jit(inverse_cdf)
sample = jax.jit(draw, static_argnums=4)


# ---------------------------------------------------------------------------------------------------------- inverse CDF


def whole_weights(vocab, total, seed=0):
    """Whole numbers that add up to `total`, most of them 0: sums are exact in float32."""
    chosen = np.random.default_rng(seed).choice(vocab, size=total, p=np.full(vocab, 1 / vocab))
    return np.bincount(chosen, minlength=vocab)


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 260, 1000, 128 * 130 + 3])
def test_every_id_gets_its_share_of_the_unit_interval(vocab):
    """The middles of 256 equal parts of [0, 1) draw each id as often as its weight says, in the order of the ids."""
    total = 256
    weights = whole_weights(vocab, total)
    uniforms = (np.arange(total) + 0.5) / total
    ids, sums = pick(jnp.asarray(np.tile(weights, (total, 1)), jnp.float32), jnp.asarray(uniforms, jnp.float32))
    np.testing.assert_array_equal(ids, np.repeat(np.arange(vocab), weights))
    np.testing.assert_array_equal(sums, total)


@pytest.mark.parametrize("vocab", [5, 260, 1000])
def test_ends_of_the_interval_draw_the_outermost_ids(vocab):
    """0 draws the first id that has a weight, the largest uniform below 1 the last; not an id of the padding."""
    weights = whole_weights(vocab, 256, seed=1)
    weights[[0, -1]] = 0
    weights[-2] += weights.sum() == 0
    ids, _ = pick(jnp.asarray(np.tile(weights, (2, 1)), jnp.float32), jnp.array([0, LARGEST_BELOW_ONE]))
    np.testing.assert_array_equal(ids, np.flatnonzero(weights)[[0, -1]])


def test_boundaries_belong_to_the_next_id():
    """P(id) is exact only if each boundary value falls to one side: [start, end)."""
    weights = jnp.tile(jnp.array([[1, 0, 2, 1]], jnp.float32), (4, 1))
    ids, _ = pick(weights, jnp.array([0, 0.25, 0.5, 0.75], jnp.float32))
    np.testing.assert_array_equal(ids, [0, 2, 2, 3])


def test_rounding_of_cumulative_sums_draws_no_id_of_zero_weight():
    """Many blocks are added up as a tree, and the cumulative sum then moves, up or down, where a weight is zero.

    Uniforms lie within a few units of rounding of the largest such moves among many random weights.
    """
    rng = np.random.default_rng(0)
    sums = (rng.random((2048, 384)) * (rng.random((2048, 384)) < 0.5)).astype(np.float32)
    ends = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=1))(sums))
    moves = np.where(sums[:, 1:] == 0, np.abs(np.diff(ends, axis=1)), 0)
    rows = np.argsort(-moves.max(1))[:24]
    at = moves[rows].argmax(1) + 1
    near = (ends[rows, at] / ends[rows, -1])[:, None] * (1 + np.arange(-3, 4) * 2.0**-24)
    weights = np.zeros((24, 384, 128), np.float32)
    weights[:, :, 70] = sums[rows]
    weights = np.repeat(weights.reshape(24, -1), 7, axis=0)
    drawn = np.asarray(pick(jnp.asarray(weights), jnp.asarray(near.ravel(), jnp.float32))[0])
    assert drawn.max() < weights.shape[1]
    assert weights[np.arange(len(drawn)), drawn].min() > 0


def uniforms_32():
    return st.floats(0, float(LARGEST_BELOW_ONE), width=32)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0.1, 30), st.lists(uniforms_32(), min_size=8, max_size=8))
def test_drawn_id_holds_its_uniform(seed, zeros, spread, uniforms):
    rng = np.random.default_rng(seed)
    weights = np.exp(spread * rng.normal(size=(8, 300))) * (rng.random((8, 300)) >= zeros)
    weights[:, rng.integers(300)] = 1
    weights = (weights / weights.max(1, keepdims=True)).astype(np.float32)
    ids = np.asarray(pick(jnp.asarray(weights), jnp.asarray(uniforms, jnp.float32))[0])
    rows = np.arange(8)
    assert (weights[rows, ids] > 0).all()
    ends = np.cumsum(weights, 1, dtype=np.float64)
    share = ends / ends[:, -1:]
    assert (share[rows, ids] >= np.array(uniforms) - 1e-6).all()
    assert (share[rows, ids] - weights[rows, ids] / ends[:, -1] <= np.array(uniforms) + 1e-6).all()


# ----------------------------------------------------------------------------------------------------------------- draw

ROWS, VOCAB, HEAD = 6, 260, 5
LOGITS = np.random.default_rng(0).normal(size=(ROWS, VOCAB)) * 3
TEMPERATURES = np.array([1, 0.5, 2, 0, 1, 0])
SEEDS = np.array([0, 1, 2, 3, 4, 2**32 - 1], np.uint32)
COUNTS = np.arange(ROWS)


def one_draw(logits=LOGITS, temperatures=TEMPERATURES, seeds=SEEDS, counts=COUNTS, head=HEAD):
    return sample(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(temperatures, jnp.float32),
        jnp.asarray(seeds, jnp.uint32),
        jnp.asarray(counts, jnp.int32),
        head,
    )


def distribution(logits=LOGITS, temperatures=TEMPERATURES):
    """Log-probs in float64; a temperature of 0 counts as 1."""
    scaled = logits / np.where(temperatures == 0, 1, temperatures)[:, None]
    return (
        scaled
        - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
        - scaled.max(1, keepdims=True)
    )


def test_logprobs_are_of_the_distribution_that_was_sampled():
    drawn = one_draw()
    wanted = np.take_along_axis(distribution(), np.asarray(drawn.tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(drawn.logprobs, wanted, atol=1e-5)


def test_temperature_zero_takes_the_likeliest():
    """And what is sampled beside it does not depend on its being there."""
    greedy = TEMPERATURES == 0
    tokens = np.asarray(one_draw().tokens)
    np.testing.assert_array_equal(tokens[greedy], LOGITS.argmax(1)[greedy])
    without = np.asarray(one_draw(temperatures=np.where(greedy, 1, TEMPERATURES)).tokens)
    np.testing.assert_array_equal(tokens[~greedy], without[~greedy])
    assert (tokens[greedy] != without[greedy]).any()


def test_head_is_the_likeliest_candidates_in_order():
    drawn, logprobs = one_draw(), distribution()
    order = np.argsort(-logprobs, 1)[:, :HEAD]
    np.testing.assert_array_equal(drawn.head_ids, order)
    np.testing.assert_allclose(drawn.head_logprobs, np.take_along_axis(logprobs, order, 1), atol=1e-5)
    assert (np.diff(drawn.head_logprobs, axis=1) <= 0).all()


def test_whole_vocabulary_as_head_and_none():
    whole = one_draw(head=VOCAB)
    np.testing.assert_allclose(np.exp(whole.head_logprobs).sum(1), 1, atol=1e-5)
    at_token = whole.head_logprobs[np.asarray(whole.head_ids) == np.asarray(whole.tokens)[:, None]]
    np.testing.assert_array_equal(at_token, whole.logprobs)
    none = one_draw(head=0)
    assert none.head_ids.shape == none.head_logprobs.shape == (ROWS, 0)
    np.testing.assert_array_equal(none.tokens, whole.tokens)


def test_a_draw_follows_its_seed_whatever_the_slot():
    order = np.array([3, 5, 0, 2, 1, 4])
    moved = one_draw(LOGITS[order], TEMPERATURES[order], SEEDS[order], COUNTS[order])
    for got, wanted in zip(jax.tree.leaves(moved), jax.tree.leaves(one_draw()), strict=True):
        np.testing.assert_array_equal(got, np.asarray(wanted)[order])


def test_huge_and_impossible_logits():
    """A constant cancels; an id of -inf is not drawn."""
    warm = np.where(TEMPERATURES == 0, 1, TEMPERATURES)
    shifted = one_draw(LOGITS.astype(np.float32) + np.float32(4096), warm)
    wanted = np.take_along_axis(distribution(LOGITS, warm), np.asarray(shifted.tokens)[:, None], 1)[:, 0]
    np.testing.assert_allclose(shifted.logprobs, wanted, atol=5e-3)  # of float32 near 4096
    only = np.full((ROWS, VOCAB), -np.inf)
    only[np.arange(ROWS), 100 + COUNTS] = 7
    np.testing.assert_array_equal(one_draw(only).tokens, 100 + COUNTS)
    np.testing.assert_array_equal(one_draw(only).logprobs, 0)


# ----------------------------------------------------------------------------------------------------------- randomness

MANY, SIDES = 4096, 16
DIE = np.random.default_rng(5).normal(size=SIDES)


def throws(seeds, counts):
    seeds, counts = np.broadcast_to(seeds, MANY), np.broadcast_to(counts, MANY)
    return np.asarray(one_draw(np.tile(DIE, (MANY, 1)), np.full(MANY, 0.8), seeds, counts, 0).tokens)


def surprise(observed, expected):
    """Upper tail probability of Pearson's chi-square of counts."""
    return stats.chisquare(observed.ravel(), expected.ravel()).pvalue


@pytest.mark.parametrize(
    "seeds, counts", [(np.arange(MANY), 0), (7, np.arange(MANY)), (2**32 - 1 - np.arange(MANY), 3)]
)
def test_frequencies_are_those_of_the_distribution(seeds, counts):
    """Over requests, and over the tokens of one. Fixed seeds: this passes or fails for good."""
    probabilities = np.exp(distribution(DIE[None], np.array([0.8]))[0])
    assert surprise(np.bincount(throws(seeds, counts), minlength=SIDES), MANY * probabilities) > 0.01


@pytest.mark.parametrize("second", [(np.arange(MANY), 1), (np.arange(MANY) + 1, 0)], ids=["next token", "next seed"])
def test_neighbouring_draws_are_independent(second):
    first, then = throws(np.arange(MANY), 0), throws(*second)
    counts = np.histogram2d(first // 4, then // 4, bins=4)[0]
    assert stats.chi2_contingency(counts).pvalue > 0.01
