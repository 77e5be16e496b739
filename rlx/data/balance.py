"""Which rows share a micro-batch, so that its tokens spread over the experts: never worse than the order given.

Experts that lie on different devices wait for the busiest of them, in every layer of every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

PASSES = 4  # over all pairs of rows; each later one finds less


def busiest(loads: np.ndarray) -> float:
    """Tokens of the busiest expert of each layer, summed over layers: what a micro-batch takes. loads: [layers, E]."""
    return float(loads.max(axis=-1).sum())


def cost(loads: np.ndarray, order: Sequence[int], rows: int) -> float:
    """`busiest` of every micro-batch of `rows` rows, summed. loads: [rows in all, layers, E]."""
    return sum(busiest(loads[list(part)].sum(axis=0)) for part in itertools.batched(order, rows))


def balanced(loads: np.ndarray, rows: int) -> list[int]:
    """An order of the rows with a `cost` of at most that of the order given: rows change places while it gets lower.

    loads: float [rows in all, layers, E], tokens of each row that each expert gets. rows: of a micro-batch.
    """
    order = list(range(len(loads)))
    totals = [loads[list(part)].sum(axis=0) for part in itertools.batched(order, rows)]
    for _ in range(PASSES):
        improved = False
        for i, j in itertools.combinations(range(len(order)), 2):
            first, second = i // rows, j // rows
            if first == second:
                continue
            difference = loads[order[j]] - loads[order[i]]
            new = totals[first] + difference, totals[second] - difference
            if busiest(new[0]) + busiest(new[1]) < busiest(totals[first]) + busiest(totals[second]) - 1e-6:
                order[i], order[j] = order[j], order[i]
                totals[first], totals[second] = new
                improved = True
        if not improved:
            break
    return order
