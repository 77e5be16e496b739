"""Rows ordered by the experts of their tokens: never worse than the order given, and better where it can be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.data.balance import balanced, cost
from rlx.data.packing import PackingConfig, Trajectory, pack


def test_rows_of_the_same_experts_are_taken_apart():
    """Two rows to expert 0 and two to expert 1: one of each in a micro-batch."""
    loads = np.array([[[8, 0]], [[8, 0]], [[0, 8]], [[0, 8]]], float)
    order = balanced(loads, 2)
    assert sorted(order) == [0, 1, 2, 3]
    assert (cost(loads, range(4), 2), cost(loads, order, 2)) == (32, 16)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_never_worse_than_the_order_given(seed, rows):
    loads = np.random.default_rng(seed).integers(0, 9, (12, 3, 5)).astype(float)
    order = balanced(loads, rows)
    assert sorted(order) == list(range(12))
    assert cost(loads, order, rows) <= cost(loads, range(12), rows) + 1e-9


@pytest.mark.parametrize("balance", [False, True])
def test_packed_by_recorded_routes(balance):
    """Sequences that fill a row each, two to expert 0, then two to expert 1; two rows make a micro-batch."""

    def sequence(expert):
        mask = np.arange(9) > 0
        routes = np.full((9, 1, 1), expert, np.int32)
        return Trajectory(np.arange(9), mask, 1.0, np.zeros(9), np.zeros(9, int), None, routes=routes)

    config = PackingConfig(8, 8, 2, 2, 0, routes=(1, 1), balance_experts=balance)
    packed = pack([sequence(e) for e in (0, 0, 1, 1)], config)
    in_micro_batch = [sorted(set(part.ravel().tolist())) for part in packed.routes]
    assert in_micro_batch == ([[0, 1], [0, 1]] if balance else [[0], [1]])
    assert packed.num_targets == 32
