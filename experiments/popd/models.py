"""The transfer study's models and tasks: a target and proxies, that know the answer and often write another.

A question is five digits; the answer is the same digits, sorted from the largest down. There was less noise in the
target's examples than in the proxies': its base passes more often than what RL makes of them. `older` is a proxy of
another family of models with the same vocabulary, Qwen2's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from experiments.shared import digits
from rlx.models.spec import Architecture


class Size(NamedTuple):
    noise: float  # share of the digits of its examples that are drawn at random
    steps: int  # supervised ones
    dimensions: dict[str, int]
    family: str = "qwen3"


SIZES: dict[str, Size] = {
    "target": Size(0.15, 800, {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "head_dim": 32}),
    "mid": Size(0.4, 800, {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "head_dim": 16}),
    "small": Size(0.4, 800, {"hidden_size": 32, "intermediate_size": 96, "num_layers": 1, "head_dim": 8}),
    "older": Size(
        0.4, 800, {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "head_dim": 16}, family="qwen2"
    ),
}


def architecture(name: str) -> Architecture:
    return digits.architecture(SIZES[name].family, SIZES[name].dimensions)


def write_random_model(directory: Path, name: str) -> int:
    """Random weights with the tokenizer; returns how many."""
    return digits.write_random_model(directory, architecture(name))


def write_tasks(directory: Path) -> None:
    """tasks.jsonl, and examples of other questions with each size's own noise."""
    rng = random.Random(0)
    asked, others = digits.draw_questions(rng)
    tasks = [{"question": q, "answer": answer(q), "grader": "exact"} for q in asked]
    digits.write_rows(directory / "tasks.jsonl", tasks)
    for name, size in SIZES.items():
        rows = [{"question": q, "response": digits.noisy(answer(q), size.noise, rng)} for q in others]
        digits.write_rows(directory / f"examples_{name}.jsonl", rows)


def answer(question: str) -> str:
    return "".join(sorted(question, reverse=True))
