"""The transfer study's models and tasks: a target and proxies, that know the answer and often write another.

A question is five digits; the answer is the same digits, sorted from the largest down. There was less noise in the
target's examples than in the proxies': its base passes more often than what RL makes of them. `older` is a proxy of
another family of models with the same vocabulary, Qwen2's.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.models import DIGITS, SPECIAL, write_tokenizer
from rlx.models.presets import dense, write_random
from rlx.models.spec import Architecture, count_parameters

QUESTIONS, EXAMPLES = 1500, 6000


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
    more: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tied": True}
    return dense(SIZES[name].family, vocab_size=256 + len(SPECIAL), max_positions=64, **SIZES[name].dimensions, **more)


def write_random_model(directory: Path, name: str) -> int:
    """Random weights with the tokenizer; returns how many."""
    if not directory.exists():
        write_random(directory, architecture(name), tokenizer_from=None, seed=1, scale=0.08)
        write_tokenizer(directory)
    return count_parameters(architecture(name))


def write_tasks(directory: Path) -> None:
    """tasks.jsonl, and examples of other questions with each size's own noise."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    questions = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    rng.shuffle(questions)
    tasks = [{"question": q, "answer": answer(q), "grader": "exact"} for q in questions[:QUESTIONS]]
    _write(directory / "tasks.jsonl", tasks)
    others = questions[QUESTIONS : QUESTIONS + EXAMPLES]
    for name, size in SIZES.items():
        rows = [{"question": q, "response": noisy(answer(q), size.noise, rng)} for q in others]
        _write(directory / f"examples_{name}.jsonl", rows)


def answer(question: str) -> str:
    return "".join(sorted(question, reverse=True))


def noisy(text: str, noise: float, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if rng.random() < noise else digit for digit in text)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
