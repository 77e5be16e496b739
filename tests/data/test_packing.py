"""Packing: every target lands once behind what predicts it, shared beginnings are laid out once, errors say why."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.data.packing import PackingConfig, Trajectory, computed_tokens, pack, rows_needed
from rlx.types import RowShape, TopK

CONFIG = PackingConfig(row_tokens=24, row_targets=10, rows=2, capacity=8, head_size=3)


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
    """Any sizes within the limits."""
    anything = st.tuples(st.integers(1, tokens), st.integers(0, targets))
    return st.lists(anything.map(lambda s: (s[0], min(s[1], s[0] - 1))), min_size=1, max_size=count)


def group_of(seed, name, prompt, count, longest):
    """`count` sequences that begin with the same `prompt` tokens; all tokens behind them are targets."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 99, prompt).astype(np.int32)
    found = []
    for i in range(count):
        length = prompt + int(rng.integers(1, longest + 1))
        t = make(1000 * seed + i, (length, 0))
        tokens = np.concatenate([shared, t.tokens[prompt:]])
        mask = np.arange(length) >= prompt
        head = make(seed + i, (length, length - prompt)).head
        found.append(dataclasses.replace(t, tokens=tokens, mask=mask, head=head, group=name))
    return found


@st.composite
def groups(draw):
    """Some groups, and sequences that are of none."""
    found = trajectories(draw(sizes_up_to(24, 10, count=4)))
    for name in range(draw(st.integers(1, 4))):
        prompt, longest = draw(st.integers(1, 14)), draw(st.integers(1, 10))
        found += group_of(draw(st.integers(1, 99)), name, prompt, draw(st.integers(1, 9)), longest)
    return found


ROOMY = dataclasses.replace(CONFIG, capacity=40)

# --------------------------------------------------------------------------------------------------------------- batch


def sees(batch, row, t):
    """Indices in the row of the tokens that token `t` sees, by their position: the rule, once more."""
    segments, positions = batch.segment_ids[row], batch.positions[row]
    own = (segments == segments[t]) | ((segments == batch.prefix_ids[row][t]) & (batch.prefix_ids[row][t] > 0))
    seen = np.flatnonzero(own & (positions <= positions[t]) & (segments > 0))
    return seen[np.argsort(positions[seen], kind="stable")]


def unpacked(batch, count):
    """Of each trajectory, read from the batch alone: per target in order its values and all that predicts it."""
    fields = ("target_tokens", "advantages", "sampler_logprobs", "ages", "head_ids", "head_logprobs", "lengths")
    found = [{name: getattr(batch, name)[batch.sequences == i + 1] for name in fields} for i in range(count)]
    for entry in found:
        entry["context"] = []
    for m, r, n in np.argwhere(batch.mask):
        seen = sees(batch, (m, r), batch.source[m, r, n])
        np.testing.assert_array_equal(batch.positions[m, r][seen], np.arange(len(seen)))
        found[batch.sequences[m, r, n] - 1]["context"].append(batch.tokens[m, r][seen].tolist())
    return found


@settings(max_examples=60)
@given(groups(), st.booleans())
def test_every_target_lands_once_behind_all_that_predicts_it(given_, share):
    assert_every_target_lands_once(pack(given_, dataclasses.replace(ROOMY, share_prefixes=share)), given_)


def assert_every_target_lands_once(batch, given_):
    assert batch.mask.sum() == batch.num_targets == sum(t.mask.sum() for t in given_)
    assert batch.num_sequences == sum(t.mask.any() for t in given_)
    np.testing.assert_array_equal(batch.mask, batch.sequences > 0)
    for t, found in zip(given_, unpacked(batch, len(given_)), strict=True):
        chosen = np.flatnonzero(t.mask)
        assert found["context"] == [t.tokens[:at].tolist() for at in chosen]
        np.testing.assert_array_equal(found["target_tokens"], t.tokens[chosen])
        np.testing.assert_array_equal(found["sampler_logprobs"], t.logprobs[chosen])
        np.testing.assert_array_equal(found["ages"], t.ages[chosen])
        np.testing.assert_array_equal(found["advantages"], np.full(len(chosen), t.advantage, np.float32))
        np.testing.assert_array_equal(found["lengths"], np.full(len(chosen), len(chosen)))
        np.testing.assert_array_equal(found["head_ids"], t.head.ids)
        np.testing.assert_array_equal(found["head_logprobs"], t.head.logprobs)


@settings(max_examples=60)
@given(groups(), st.sampled_from([RowShape(4, 3), RowShape(14, 2), RowShape(24, 1)]))
def test_with_places_too_and_each_part_begins_in_its_own(given_, shape):
    own = 24
    config = dataclasses.replace(ROOMY, row_tokens=shape.prefix + shape.samples * own, row_shape=shape)
    batch = pack(given_, config)
    assert_every_target_lands_once(batch, given_)
    assert rows_needed(given_, config) <= batch.segment_ids[..., 0].size
    for row in np.ndindex(batch.segment_ids.shape[:2]):
        parts = np.split(batch.segment_ids[row], range(shape.prefix, config.row_tokens, own))
        assert set(parts[0]) <= {0, 1}
        assert all(len(set(part) - {0}) <= 1 for part in parts)
        assert all((part[: (part > 0).sum()] > 0).all() for part in parts)


def test_rows_of_samples_that_share_nothing_have_no_shape():
    with pytest.raises(ValueError, match=r"RowShape\(prefix=4, samples=2\) .*: share prefixes"):
        dataclasses.replace(CONFIG, share_prefixes=False, row_shape=RowShape(4, 2))


@given(groups(), st.booleans())
def test_no_token_is_computed_in_vain(given_, share):
    """Every token is seen by the source of a target; padding is zeros; segments lie whole, one behind the other."""
    batch = pack(given_, dataclasses.replace(ROOMY, share_prefixes=share))
    for row in np.ndindex(batch.segment_ids.shape[:2]):
        used = np.zeros(CONFIG.row_tokens, bool)
        for at in batch.source[row][batch.mask[row]]:
            used[sees(batch, row, at)] = True
        np.testing.assert_array_equal(batch.segment_ids[row] > 0, used)
        segments = batch.segment_ids[row][used]
        assert used[: len(segments)].all()
        assert (np.diff(segments) >= 0).all()
        assert set(segments) <= set(range(1, 1 + segments.max(initial=0)))
    assert not batch.tokens[batch.segment_ids == 0].any()


def test_a_group_s_prompt_is_laid_out_once_in_a_row():
    """Four prompt tokens, and responses of 3, 1 and 2 tokens of which the last predicts nothing."""
    lengths, shared = (7, 5, 6), np.array([5, 6, 7, 8], np.int32)
    given_ = []
    for i, length in enumerate(lengths):
        t = make(i, (length, length - 4))
        own = np.arange(length - 4, dtype=np.int32) + 10 * (i + 1)
        tokens = np.concatenate([shared, own])
        given_.append(dataclasses.replace(t, tokens=tokens, mask=np.arange(length) >= 4, group=3))
    batch = pack(given_, CONFIG)
    row = (0, 0, slice(0, 8))
    np.testing.assert_array_equal(batch.tokens[row], [5, 6, 7, 8, 10, 11, 30, 0])
    np.testing.assert_array_equal(batch.positions[row], [0, 1, 2, 3, 4, 5, 4, 0])
    np.testing.assert_array_equal(batch.segment_ids[row], [1, 1, 1, 1, 2, 2, 3, 0])
    np.testing.assert_array_equal(batch.prefix_ids[row], [0, 0, 0, 0, 1, 1, 1, 0])
    # In order of size; every first token of a response is predicted from the prompt's last.
    np.testing.assert_array_equal(batch.target_tokens[0, 0, :6], [10, 11, 12, 30, 31, 20])
    np.testing.assert_array_equal(batch.source[0, 0, :6], [3, 4, 5, 3, 6, 3])
    assert (batch.num_tokens, batch.unshared_tokens) == (7, 6 + 4 + 5)
    assert batch.shared_fraction == pytest.approx(8 / 15)


def test_only_what_no_member_trains_on_is_shared():
    """The second sequence is trained from its third token on, and the third one differs at its second."""
    t = group_of(1, 7, prompt=6, count=3, longest=3)
    early = dataclasses.replace(t[1], mask=np.arange(len(t[1].tokens)) >= 2, head=None)
    config = dataclasses.replace(CONFIG, head_size=0)
    assert pack([t[0], early], config).prefix_ids.max() == 1
    assert (pack([t[0], early], config).segment_ids == 1).sum() == 2
    other = dataclasses.replace(t[2], tokens=t[2].tokens + np.where(np.arange(len(t[2].tokens)) == 1, 1, 0))
    assert (pack([t[0], other], config).segment_ids == 1).sum() == 1


def test_sharing_is_of_a_group_and_can_be_switched_off():
    one, two = group_of(1, 7, prompt=6, count=2, longest=3)
    strangers = [dataclasses.replace(one, group=None), dataclasses.replace(two, group=None)]
    others = [one, dataclasses.replace(two, group=8)]
    off = dataclasses.replace(CONFIG, share_prefixes=False)
    assert pack([one, two], CONFIG).shared_fraction > 0.2
    for batch in (pack(strangers, CONFIG), pack(others, CONFIG), pack([one, two], off)):
        assert batch.shared_fraction == 0
        assert not batch.prefix_ids.any()


def test_what_predicts_nothing_is_left_out():
    """A sequence without a target, and the tokens from the last target on."""
    given_ = [make(0, (9, 0)), make(1, (9, 1)), make(2, (1, 0))]
    batch = pack(given_, CONFIG)
    assert batch.num_tokens == batch.unshared_tokens == computed_tokens(given_[1]) == np.flatnonzero(given_[1].mask)[0]
    assert computed_tokens(given_[0]) == 0
    assert batch.num_sequences == 1


def test_a_batch_has_the_micro_batches_that_it_needs():
    given_ = [make(i, (24, 10)) for i in range(3)]
    batch = pack(given_, CONFIG)
    assert rows_needed(given_, CONFIG) == 3
    assert batch.num_micro_batches == len(batch.tokens) == 2
    assert batch.fill_rate == sum(computed_tokens(t) for t in given_) / (2 * 2 * 24)
    assert batch.head_ids.shape == (2, 2, 10, 3)


def test_nothing_packed_is_one_micro_batch_of_padding():
    batch = pack([], CONFIG)
    assert batch.num_micro_batches == batch.fill_rate == batch.shared_fraction == 0
    assert batch.tokens.shape == (1, 2, 24)
    assert not batch.mask.any()


def test_without_heads():
    batch = pack([make(0, (5, 2))], dataclasses.replace(CONFIG, head_size=0))
    assert batch.head_ids is None
    assert batch.head_logprobs is None
    assert batch.mask.sum() == 2


# -------------------------------------------------------------------------------------------------------------- errors


def changed(**changes):
    return [make(0, (5, 2)), dataclasses.replace(make(1, (5, 2)), **changes)]


def long(i, tokens, targets):
    """The last token is a target, so all but that are computed."""
    t = make(i, (tokens, targets))
    return dataclasses.replace(t, mask=np.arange(tokens) >= tokens - targets)


@pytest.mark.parametrize(
    "given_, said",
    [
        (
            [make(0, (3, 1)), long(1, 26, 3)],
            r"trajectory 1: 25 tokens are computed for its 3 targets; .*learner.row_tok",
        ),
        ([make(0, (20, 11))], "trajectory 0: .* its 11 targets; a row holds 24 and 10"),
        (
            [long(i, 20, 1) for i in range(17)],
            "17 trajectories need 17 rows; the batch has at most 8 micro-batches of 2",
        ),
        (changed(mask=np.ones(5, bool)), "trajectory 1: its first token is masked in"),
        (changed(head=None), r"trajectory 1: no head; \[2, 3\] expected"),
        (changed(head=make(0, (5, 2), head_size=4).head), r"trajectory 1: a head of \[2, 4\]; \[2, 3\] expected"),
        (changed(head=make(0, (5, 1)).head), r"trajectory 1: a head of \[1, 3\]; \[2, 3\] expected"),
    ],
)
def test_what_does_not_fit_is_named(given_, said):
    with pytest.raises(ValueError, match=said):
        pack(given_, CONFIG)


def test_a_sequence_may_be_one_token_longer_than_a_row():
    """Its last token is predicted, and predicts nothing."""
    assert pack([long(0, 25, 3)], CONFIG).fill_rate == 24 / 48
