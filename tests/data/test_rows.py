"""The planner of rows: everything is placed once, rows hold it, families are split only where that saves a row."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.rows import Family, Member, plan_fixed_rows, plan_rows
from rlx.types import RowShape

TOKENS, TARGETS = 24, 10


def family(prefix, *sizes, first=0):
    """Members of (tokens, targets)."""
    return Family(prefix, tuple(Member(first + i, *size) for i, size in enumerate(sizes)))


def alone(*sizes):
    return [family(0, size, first=i) for i, size in enumerate(sizes)]


def indices(rows):
    """The trajectories of each row."""
    return [[m.number for part in row for m in part.members] for row in rows]


@st.composite
def any_families(draw):
    """Sizes of which each fits a row of its own."""
    numbers = itertools.count()
    found = []
    for _ in range(draw(st.integers(1, 8))):
        prefix = draw(st.integers(0, TOKENS // 2))
        count = draw(st.integers(1, 9)) if prefix else 1
        size = st.tuples(st.integers(0, TOKENS - prefix), st.integers(1, TARGETS))
        found.append(Family(prefix, tuple(Member(next(numbers), *draw(size)) for _ in range(count))))
    return found


@given(any_families())
def test_each_member_is_in_one_row_behind_its_own_prefix_and_rows_hold_it(families):
    rows = plan_rows(families, TOKENS, TARGETS)
    members = {m: f.prefix for f in families for m in f.members}
    placed = [(m, part.prefix) for row in rows for part in row for m in part.members]
    assert len(placed) == len(members)
    assert dict(placed) == members
    assert all(sum(p.tokens for p in row) <= TOKENS and sum(p.targets for p in row) <= TARGETS for row in rows)
    assert all(row and all(p.members for p in row) for row in rows)


@given(any_families())
def test_a_family_is_in_a_row_once(families):
    """Twice would lay its prefix out twice."""
    home = {m: i for i, f in enumerate(families) for m in f.members}
    for row in plan_rows(families, TOKENS, TARGETS):
        owners = [home[part.members[0]] for part in row]
        assert len(set(owners)) == len(owners)


@given(any_families())
def test_a_row_is_opened_only_where_no_other_takes_its_first_family_whole(families):
    rows = plan_rows(families, TOKENS, TARGETS)
    for later in range(1, len(rows)):
        first = rows[later][0]
        for row in rows[:later]:
            tokens, targets = sum(p.tokens for p in row), sum(p.targets for p in row)
            assert tokens + first.tokens > TOKENS or targets + first.targets > TARGETS


def test_sequences_alone_go_first_fit_decreasing_and_equal_sizes_keep_their_order():
    assert indices(plan_rows(alone(*[(8, 1)] * 5), TOKENS, TARGETS)) == [[0, 1, 2], [3, 4]]
    assert indices(plan_rows(alone((4, 1), (20, 1), (4, 1)), TOKENS, TARGETS)) == [[1, 0], [2]]
    assert plan_rows([], TOKENS, TARGETS) == []


def test_a_family_stays_whole_where_a_row_takes_it():
    """24 tokens: 8 in common and 16; the gap of 10 beside the single sequence would take a part of it."""
    rows = plan_rows([*alone((14, 1)), family(8, *[(2, 1)] * 8, first=1)], TOKENS, TARGETS)
    assert indices(rows) == [[1, 2, 3, 4, 5, 6, 7, 8], [0]]


def test_a_family_larger_than_a_row_takes_its_prefix_along():
    rows = plan_rows([family(4, *[(5, 1)] * 10)], TOKENS, TARGETS)
    assert indices(rows) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [row[0].prefix for row in rows] == [4, 4, 4]


def test_a_row_is_dissolved_into_the_gaps_of_the_others():
    """Three families of 14 tokens, of which no two fit a row; each gap of 10 takes the prefix and half of the third."""
    families = [family(4, (3, 1), (3, 1), (3, 1), (1, 1), first=10 * i) for i in range(3)]
    rows = plan_rows(families, TOKENS, TARGETS)
    assert len(rows) == 2
    assert [sum(p.tokens for p in row) for row in rows] == [24, 22]


def test_rows_that_cannot_be_fewer_are_left_as_they_are(monkeypatch):
    """To try each is quadratic in their number."""
    monkeypatch.setattr("rlx.data.rows._dissolved", lambda rows: pytest.fail("it was tried"))
    assert len(plan_rows(alone(*[(TOKENS, 1)] * 64), TOKENS, TARGETS)) == 64
    assert len(plan_rows(alone(*[(1, TARGETS)] * 64), TOKENS, TARGETS)) == 64
    assert len(plan_rows([family(4, *[(5, 1)] * 8)], TOKENS, TARGETS)) == 2


def test_targets_are_a_budget_of_their_own():
    assert indices(plan_rows([family(4, *[(1, 4)] * 4)], TOKENS, TARGETS)) == [[0, 1], [2, 3]]
    assert indices(plan_rows(alone((6, 6), (6, 6), (5, 4)), TOKENS, TARGETS)) == [[0, 2], [1]]


def test_rows_of_groups_are_nearly_full():
    """40 groups of eight, prompts of about 36 tokens, responses of 1 to 19, in rows of 192: hardly padding, and
    fewer rows than whole groups would take."""
    rng = np.random.default_rng(0)
    fills, saved = [], []
    for _ in range(10):
        drawn = [(int(rng.integers(34, 39)), rng.integers(1, 20, 8).tolist()) for _ in range(40)]
        families = [family(p, *((n, n + 1) for n in own), first=8 * i) for i, (p, own) in enumerate(drawn)]
        whole = plan_rows(alone(*((f.tokens, f.targets) for f in families)), 192, 192)
        rows = plan_rows(families, 192, 192)
        fills.append(sum(part.tokens for row in rows for part in row) / (192 * len(rows)))
        saved.append(len(whole) - len(rows))
    assert np.mean(fills) > 0.9
    assert np.mean(saved) > 5


def test_what_no_row_holds_is_named():
    with pytest.raises(ValueError, match=r"trajectory 7: 25 tokens are computed for its 3 targets; a row holds 24 and"):
        plan_rows([family(20, (5, 3), first=7)], TOKENS, TARGETS)
    with pytest.raises(ValueError, match=r"trajectory 0: 5 tokens .* its 11 targets; .*Raise learner.row_tokens or"):
        plan_rows(alone((5, 11)), TOKENS, TARGETS)


SHAPE = RowShape(4, 2)  # of 10 tokens each


def test_with_places_a_row_holds_one_family_or_as_many_members_as_it_has_room_for():
    families = [family(4, *[(10, 3)] * 3), family(2, (1, 6), (1, 5), first=3), family(0, (7, 1), first=5)]
    rows = plan_fixed_rows(families, TOKENS, TARGETS, SHAPE)
    assert indices(rows) == [[0, 1], [2], [3], [4], [5]]
    assert [part.prefix for row in rows for part in row] == [4, 4, 2, 2, 0]


@pytest.mark.parametrize("prefix, size", [(5, (3, 1)), (4, (11, 1)), (4, (3, 11))])
def test_what_no_place_holds_is_named(prefix, size):
    said = r"trajectory 7: .* a row holds 4 .*, 10 for each .* and 10 .*row_samples to 0"
    with pytest.raises(ValueError, match=said):
        plan_fixed_rows([family(prefix, size, first=7)], TOKENS, TARGETS, SHAPE)
