"""Tasks of our own that a program helps with: arithmetic beyond mental reach, questions about a table in a file.

arithmetic  "What is 4831 * 927?" Options: min_digits and max_digits of each number (3 and 4), operations ("+-*").
table       "data.csv has the columns ... What are the sum of price and the largest count?" Options: min_rows and
            max_rows (10 and 40), questions (2). The answer has one number for each question.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from rlx.types import Task

COLUMNS = ("age", "count", "height", "price", "score", "weight")
ASKED: Mapping[str, Callable[[list[int]], int]] = {
    "sum": lambda values: sum(values),
    "largest": max,
    "smallest": min,
    "spread, the largest minus the smallest": lambda values: max(values) - min(values),
}


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    min_digits: int = 3
    max_digits: int = 4
    operations: str = "+-*"

    def __post_init__(self) -> None:
        if not 1 <= self.min_digits <= self.max_digits <= 12:
            raise ValueError(f"min_digits = {self.min_digits}, max_digits = {self.max_digits}: 1 to 12, in this order")
        if not self.operations or set(self.operations) - set("+-*"):
            raise ValueError(f"operations = {self.operations!r}: some of '+-*'")

    def task(self, rng: random.Random) -> tuple[str, str, dict[str, Any]]:
        """(question, answer, metadata)."""
        digits = [rng.randint(self.min_digits, self.max_digits) for _ in range(2)]
        a, b = (rng.randrange(10 ** (n - 1), 10**n) for n in digits)
        operation = rng.choice(self.operations)
        value = {"+": a + b, "-": a - b, "*": a * b}[operation]
        return f"What is {a} {operation} {b}?", str(value), {}


@dataclasses.dataclass(frozen=True)
class Table:
    min_rows: int = 10
    max_rows: int = 40
    questions: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.min_rows <= self.max_rows <= 10_000:
            raise ValueError(f"min_rows = {self.min_rows}, max_rows = {self.max_rows}: 1 to 10,000, in this order")
        if not 1 <= self.questions <= len(COLUMNS):
            raise ValueError(f"questions = {self.questions}: 1 to {len(COLUMNS)}")

    def task(self, rng: random.Random) -> tuple[str, str, dict[str, Any]]:
        columns = rng.sample(COLUMNS, max(3, self.questions))
        rows = [[rng.randint(0, 999) for _ in columns] for _ in range(rng.randint(self.min_rows, self.max_rows))]
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        asked = [(rng.choice(list(ASKED)), at) for at in rng.sample(range(len(columns)), self.questions)]
        answers = [ASKED[name]([row[at] for row in rows]) for name, at in asked]
        wanted = " and ".join(f"the {name.partition(',')[0]} of {columns[at]}" for name, at in asked)
        explained = " (spread: the largest minus the smallest)" if any("spread" in name for name, _ in asked) else ""
        question = f"The file data.csv has the columns {', '.join(columns)}. What is {wanted}?{explained}"
        return question, ", ".join(str(value) for value in answers), {"files": {"data.csv": "\n".join([*lines, ""])}}


KINDS: Mapping[str, tuple[type[Arithmetic] | type[Table], str]] = {
    "arithmetic": (Arithmetic, "number"),
    "table": (Table, "numbers"),
}  # name -> (what makes them, their grader)


def make_tasks(name: str, dataset: str, options: Mapping[str, Any], size: int, seed: int) -> list[Task]:
    """`size` tasks of source `name`; the n-th is always the same. Raises ValueError or TypeError for wrong options."""
    make, grader = KINDS[dataset]
    kind = make(**options)
    tasks = []
    for index in range(size):
        question, answer, metadata = kind.task(random.Random(f"{seed}/{name}/{index}"))
        tasks.append(Task(f"{name}/{index}", name, question, answer, grader, metadata))
    return tasks
