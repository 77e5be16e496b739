"""The study's models and tasks: a tokenizer of bytes, random weights, questions about digits, noisy answers to learn.

A question is five digits; the answer is the largest and then the smallest. The examples that a base model is made from
give each digit wrong in a share of the cases, so it knows the answer and often writes another: what is left for RL.
"""

from __future__ import annotations

import random
from pathlib import Path

from experiments.shared import digits
from rlx.models.spec import Architecture

NOISE = 0.35

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "target": ("qwen3", {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "head_dim": 32}),
    "small": ("qwen3", {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "head_dim": 16}),
    "other": ("qwen2", {"hidden_size": 96, "intermediate_size": 256, "num_layers": 2, "head_dim": 24}),
}


def architecture(name: str) -> Architecture:
    """The target, a proxy of its family, and one of another family."""
    return digits.architecture(*SIZES[name])


def write_random_model(directory: Path, name: str) -> int:
    """Random weights with the tokenizer; returns how many."""
    return digits.write_random_model(directory, architecture(name))


def write_tasks(directory: Path) -> None:
    """tasks.jsonl, and examples.jsonl of other questions with noisy answers."""
    rng = random.Random(0)
    asked, others = digits.draw_questions(rng)
    tasks = [{"question": q, "answer": answer(q), "grader": "exact"} for q in asked]
    examples = [{"question": q, "response": digits.noisy(answer(q), NOISE, rng)} for q in others]
    digits.write_rows(directory / "tasks.jsonl", tasks)
    digits.write_rows(directory / "examples.jsonl", examples)


def answer(question: str) -> str:
    return max(question) + min(question)
