"""Packing: every token lands once and says the same, bounds hold, what does not fit is named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.data.packing import PackingConfig, Trajectory, capacity_for, pack, plan_rows
from rlx.types import TopK

CONFIG = PackingConfig(row_tokens=24, row_targets=10, rows=2, capacity=8, head_size=3)
SIZES = [(10, 4), (24, 10), (7, 6), (3, 1), (12, 0), (2, 1), (9, 5), (1, 0)]  # (tokens, targets)


def make(i, size, head_size=3):
    """A trajectory of random values, its targets anywhere but at the first token."""
    tokens, targets = size
    rng = np.random.default_rng(i)
    mask = np.zeros(tokens, bool)
    mask[1 + rng.choice(max(tokens - 1, 1), targets, replace=False)] = True
    head = TopK(rng.integers(0, 99, (targets, head_size)), rng.normal(size=(targets, head_size)).astype(np.float32))
    return Trajectory(
        tokens=rng.integers(1, 99, tokens).astype(np.int32),
        mask=mask,
        advantage=float(rng.normal()),
        logprobs=rng.normal(size=tokens).astype(np.float32),
        ages=rng.integers(0, 9, tokens).astype(np.int32),
        head=head,
    )


def trajectories(sizes):
    return [make(i, size) for i, size in enumerate(sizes)]


def sizes_up_to(tokens, targets, count=40):
    """Any sizes within the limits, and many just above and below half of them: first-fit's worst."""
    near = [v for half in (tokens // 2, targets // 2) for v in (half, half + 1)]
    anything = st.tuples(st.one_of(st.integers(1, tokens), st.sampled_from(near)), st.integers(0, targets))
    return st.lists(anything.map(lambda s: (s[0], min(s[1], s[0] - 1))), min_size=1, max_size=count)


# ---------------------------------------------------------------------------------------------------------------- rows


@given(sizes_up_to(24, 10))
def test_each_trajectory_is_in_one_row_and_rows_hold_it(sizes):
    rows = plan_rows(sizes, 24, 10)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(sum(sizes[i][0] for i in row) <= 24 and sum(sizes[i][1] for i in row) <= 10 for row in rows)


@given(sizes_up_to(24, 10))
def test_rows_are_only_opened_where_nothing_fits(sizes):
    """First-fit: no row can be emptied into an earlier one, item by item."""
    rows = plan_rows(sizes, 24, 10)
    load = [(sum(sizes[i][0] for i in row), sum(sizes[i][1] for i in row)) for row in rows]
    for later in range(1, len(rows)):
        first = sizes[rows[later][0]]
        for tokens, targets in load[:later]:
            assert tokens + first[0] > 24 or targets + first[1] > 10


def test_equal_sizes_keep_their_order():
    assert plan_rows([(8, 1)] * 5, 24, 10) == [[0, 1, 2], [3, 4]]
    assert plan_rows([(4, 1), (20, 1), (4, 1)], 24, 10) == [[1, 0], [2]]
    assert plan_rows([], 24, 10) == []


@settings(max_examples=300)
@given(st.data(), st.integers(1, 24), st.integers(1, 24), st.integers(1, 5))
def test_the_capacity_is_never_exceeded(data, longest, longest_targets, rows):
    """Whatever sizes a batch has within the limits that the capacity was computed for."""
    row_tokens, row_targets = 24, max(10, longest_targets)
    sizes = data.draw(sizes_up_to(longest, min(longest_targets, longest)))
    capacity = capacity_for(len(sizes), longest, longest_targets, row_tokens, row_targets, rows)
    assert len(plan_rows(sizes, row_tokens, row_targets)) <= capacity * rows
    assert capacity * rows < len(sizes) + rows  # no more than a row for each


def test_the_capacity_grows_with_the_tokens_not_with_the_samples():
    """64 samples of at most 24 tokens, 20 of them targets, in rows of 256 and 128: 2 (6 + 10) + 1 rows."""
    assert capacity_for(64, 24, 20, 256, 128, rows=4) == 9
    assert capacity_for(64, 24, 20, 256, 128, rows=1) == 33
    assert capacity_for(3, 256, 64, 256, 256, rows=4) == 1


# --------------------------------------------------------------------------------------------------------------- batch


def unpacked(batch, count):
    """The targets of each trajectory in order, read from the batch alone: [{field: values}]."""
    fields = ("target_tokens", "advantages", "sampler_logprobs", "ages", "head_ids", "head_logprobs")
    found = [{name: getattr(batch, name)[batch.sequences == i + 1] for name in fields} for i in range(count)]
    at = np.argwhere(batch.mask)
    for i in range(count):
        places = [tuple(p) for p in at if batch.sequences[tuple(p)] == i + 1]
        sources = [(m, r, batch.source[m, r, n]) for m, r, n in places]
        found[i]["predicting"] = np.array([batch.tokens[s] for s in sources])
        found[i]["positions"] = np.array([batch.positions[s] for s in sources])
        assert len({(m, r, batch.segment_ids[m, r, t]) for m, r, t in sources}) <= 1  # of one segment
    return found


@given(sizes_up_to(24, 10, count=16))
def test_every_target_lands_once_behind_the_token_that_predicts_it(sizes):
    given_ = trajectories(sizes)
    batch = pack(given_, CONFIG)
    assert batch.mask.sum() == sum(t.mask.sum() for t in given_)
    np.testing.assert_array_equal(batch.mask, batch.sequences > 0)
    for t, found in zip(given_, unpacked(batch, len(given_)), strict=True):
        chosen = np.flatnonzero(t.mask)
        np.testing.assert_array_equal(found["target_tokens"], t.tokens[chosen])
        np.testing.assert_array_equal(found["predicting"], t.tokens[chosen - 1])
        np.testing.assert_array_equal(found["positions"], chosen - 1)
        np.testing.assert_array_equal(found["sampler_logprobs"], t.logprobs[chosen])
        np.testing.assert_array_equal(found["ages"], t.ages[chosen])
        np.testing.assert_array_equal(found["advantages"], np.full(len(chosen), t.advantage, np.float32))
        np.testing.assert_array_equal(found["head_ids"], t.head.ids)
        np.testing.assert_array_equal(found["head_logprobs"], t.head.logprobs)


@given(sizes_up_to(24, 10, count=16))
def test_inputs_are_whole_sequences_and_zeros(sizes):
    given_ = trajectories(sizes)
    batch = pack(given_, CONFIG)
    segments = []
    for row in np.ndindex(CONFIG.capacity, CONFIG.rows):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            span = np.flatnonzero(batch.segment_ids[row] == segment)
            np.testing.assert_array_equal(batch.positions[row][span], np.arange(len(span)))
            np.testing.assert_array_equal(span, span[0] + np.arange(len(span)))
            segments.append(batch.tokens[row][span].tolist())
    assert sorted(segments) == sorted(t.tokens.tolist() for t in given_)
    assert not batch.tokens[batch.segment_ids == 0].any()


def test_used_micro_batches_come_first():
    batch = pack(trajectories(SIZES), CONFIG)
    used = (batch.segment_ids > 0).any((1, 2))
    np.testing.assert_array_equal(used, np.arange(8) < batch.num_micro_batches)
    assert batch.num_micro_batches == 2
    assert batch.fill_rate == sum(tokens for tokens, _ in SIZES) / (2 * 2 * 24)
    assert batch.head_ids.shape == (8, 2, 10, 3)


def test_nothing_packed_is_an_empty_batch():
    batch = pack([], CONFIG)
    assert batch.num_micro_batches == 0
    assert batch.fill_rate == 0
    assert not batch.mask.any()


def test_without_heads():
    batch = pack([make(0, (5, 2))], dataclasses.replace(CONFIG, head_size=0))
    assert batch.head_ids is None
    assert batch.head_logprobs is None
    assert batch.mask.sum() == 2


# -------------------------------------------------------------------------------------------------------------- errors


def changed(**changes):
    return [make(0, (5, 2)), dataclasses.replace(make(1, (5, 2)), **changes)]


@pytest.mark.parametrize(
    "given_, said",
    [
        (
            [make(0, (3, 1)), make(1, (25, 3))],
            r"trajectory 1 has 25 tokens, 3 of them targets; .*Raise learner.row_tok",
        ),
        ([make(0, (20, 11))], "trajectory 0 has 20 tokens, 11 of them targets; a row holds 24 and 10"),
        (trajectories([(20, 1)] * 17), "17 trajectories need 17 rows; the batch has 8 micro-batches of 2"),
        (changed(mask=np.ones(5, bool)), "trajectory 1: its first token is masked in"),
        (changed(head=None), r"trajectory 1: no head; \[2, 3\] expected"),
        (changed(head=make(0, (5, 2), head_size=4).head), r"trajectory 1: a head of \[2, 4\]; \[2, 3\] expected"),
        (changed(head=make(0, (5, 1)).head), r"trajectory 1: a head of \[1, 3\]; \[2, 3\] expected"),
    ],
)
def test_what_does_not_fit_is_named(given_, said):
    with pytest.raises(ValueError, match=said):
        pack(given_, CONFIG)
