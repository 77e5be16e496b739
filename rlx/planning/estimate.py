"""From the largest arrays of an update's program to the bytes of its temporaries.

How many arrays of each kind are alive at once is decided by XLA's scheduler; WEIGHTS are a least-squares fit of its own
account (`bench/plan_memory.py --fit`), and `bench/plan_memory.py` shows how far they are off elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from rlx.models.description import Experts
from rlx.planning import scoring
from rlx.planning.case import Case
from rlx.planning.memory import WIDE, Temporaries, held, temporaries

# Sums of metrics, a number each, and the table of the program's results: seen to matter for a tiny model alone.
SUMS = 832
WEIGHTS = Temporaries(
    kept=1.75,
    layer=0.5,
    scores=3.13,
    heads=1.0,
    exchange=2.0,
    recurrent=6.0,
    logits=2.5,
    head=1.0,
    gradients=1.0,
    gathered=1.4,
    cast=1.0,
    dealt=1.0,
)


class Memory(NamedTuple):
    """Bytes of one device at the worst moment of an update."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    frozen: int
    activations: int
    kv_and_state: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


def memory(case: Case, *, accelerator: bool = True, engine: int = 0, served: int = 0) -> Memory:
    """engine, served: bytes of an embedded engine's cache and of the weights that it alone reads."""
    stays = held(case)
    made = weighted(temporaries(case, accelerator))
    return Memory(
        weights=stays.weights,
        adapter=stays.adapter,
        gradients=stays.gradients + int(made.gradients),
        optimizer=stays.optimizer,
        frozen=scoring.weight_bytes(case),
        activations=int(made.kept + made.layer + made.scores + made.heads + made.recurrent),
        kv_and_state=engine,
        logits=int(made.logits + made.head),
        buffers=int(made.exchange + made.gathered + made.cast + made.dealt) + stays.batch + served,
    )


def weighted(made: Temporaries) -> Temporaries:
    return Temporaries(*(weight * size for weight, size in zip(WEIGHTS, made, strict=True)))


def outputs(case: Case) -> int:
    """Of the same program: the sum, with how many tokens each expert got and each layer dropped."""
    experts = [layer.mlp.count for layer in case.arch.layers if isinstance(layer.mlp, Experts)]
    return held(case).gradients + (sum(experts) + len(experts)) * WIDE + SUMS


def arguments(case: Case) -> int:
    """Of the same program: all but the optimizer's state, and what it does not read of the batch."""
    stays = held(case)
    unread = case.rows * case.targets * WIDE // case.layout.dp  # lengths of sequences
    unread = unread if case.config.objective.aggregation == "token_mean" else 0
    return stays.weights + stays.adapter + stays.gradients + stays.batch - unread
