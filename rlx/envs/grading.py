"""How a response becomes a reward. Pure functions; `rlx.envs.graders` runs them in processes that can be killed."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rlx.envs.extract import Extract, as_number, extract, normalise_text, numbers
from rlx.types import Task

GRADERS = ("exact", "math_verify", "number", "numbers", "reasoning_gym")


class Outcome(enum.StrEnum):
    """Whether the reward is a verdict on the response. Each has a metric of its own."""

    GRADED = "graded"
    TIMEOUT = "timeout"  # the grader did not answer in time and was killed
    ERROR = "error"  # the grader raised or its process died


@dataclasses.dataclass(frozen=True)
class Grade:
    reward: float  # finite; 0 where the outcome is not GRADED
    extracted: str  # what the grader saw
    detail: str  # for people
    seconds: float
    outcome: Outcome


class Score(NamedTuple):
    reward: float
    detail: str


ScoreFunction = Callable[[Task, str, Extract], Score]


def grade(task: Task, text: str, *, mode: Extract, score: ScoreFunction) -> Grade:
    """Extract the answer from a response and score it. Whatever the grader raises becomes an ERROR."""
    start = time.perf_counter()
    # Of several numbers the last one is not the answer.
    extracted = extract(text, "all" if (task.grader, mode) == ("numbers", "last_number") else mode)
    try:
        reward, detail = score(task, extracted, mode) if extracted else Score(0.0, f"no answer ({mode})")
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
        outcome = Outcome.GRADED
    except Exception as error:
        reward, detail, outcome = 0.0, f"{type(error).__name__}: {error}", Outcome.ERROR
    return Grade(float(reward), extracted, detail, time.perf_counter() - start, outcome)


def score_answer(task: Task, answer: str, mode: Extract) -> Score:
    """Reward 0 or 1 of an extracted answer under `task.grader`; with partial credit what lies between, too.

    exact: the gold answer, whatever the case, spacing and closing punctuation. number: the last number of the answer
    has the gold answer's value. numbers: the last ones are those of the gold answer in its order; in part: the share
    that is. math_verify: equal as mathematics. reasoning_gym: the dataset's own score is 1; in part: that score.

    Raises:
        ValueError: the task itself cannot be graded: an unknown grader, no gold answer or an unreadable one.
    """
    if task.grader == "reasoning_gym":
        return _reasoning_gym(task, answer)
    if task.answer is None:
        raise ValueError(f"task {task.id} has no gold answer, which grader {task.grader!r} needs")
    match task.grader:
        case "exact":
            right = _bare(answer) == _bare(task.answer)
        case "number":
            right = _same_number(task.answer, answer)
        case "numbers":
            return Score(_credit(task, _share_of_numbers(task.answer, answer)), f"expected {task.answer}")
        case "math_verify":
            right = _same_mathematics(task.answer, answer, whole=mode == "all")
        case _:
            raise ValueError(f"task {task.id} has the unknown grader {task.grader!r}; there are {', '.join(GRADERS)}")
    return Score(float(right), f"expected {task.answer}")


def warm_up(graders: Iterable[str]) -> None:
    """Import what the graders need, so that the first grading's time limit does not pay for it."""
    if "reasoning_gym" in graders:
        import reasoning_gym  # noqa: F401
    if "math_verify" in graders:
        _same_mathematics("1/2", "0.5", whole=False)


def _bare(text: str) -> str:
    return normalise_text(text).strip(" .!\"'`*")


def _same_number(gold: str, answer: str) -> bool:
    expected = as_number(gold)
    if expected is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    return as_number(extract(answer, "last_number")) == expected


def _share_of_numbers(gold: str, answer: str) -> float:
    expected, found = numbers(gold), numbers(answer)
    if not expected:
        raise ValueError(f"the gold answer {gold!r} has no number")
    last = found[-len(expected) :]
    return sum(a == b for a, b in zip(expected, last)) / len(expected) if len(last) == len(expected) else 0.0


def partial_credit(task: Task) -> bool:
    """Whether a part of what was asked for is worth a part of the reward; its source says so."""
    return bool(task.metadata.get("partial_credit"))


def _credit(task: Task, score: float) -> float:
    """A score in [0, 1] as the task's reward."""
    return score if partial_credit(task) else float(score >= 1.0)


def _same_mathematics(gold: str, answer: str, *, whole: bool) -> bool:
    # Imported here: only a worker that grades with it pays for sympy.
    from math_verify import parse, verify

    # It warns that without its own timeout (SIGALRM, main thread only) hangs are the caller's: they are, and handled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = parse(_as_latex(gold), parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify cannot read the gold answer {gold!r}")
    found = parse(answer if whole else _as_latex(answer), parsing_timeout=None)
    return bool(verify(expected, found, timeout_seconds=None))


def _as_latex(text: str) -> str:
    """Bare mathematics is only read as far as its first number ("2x+3" is 2): mark it as a formula."""
    return text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"


@functools.lru_cache(maxsize=64)
def _scorer(dataset: str, options: str) -> Callable[[str | None, dict[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, size=1, seed=0, **json.loads(options)).score_answer


def _reasoning_gym(task: Task, answer: str) -> Score:
    """The dataset's own score, 1 only where it is full: many give a few per cent to any text (countdown, acre, ...)."""
    entry = task.metadata["entry"]
    score_answer = _scorer(task.metadata["dataset"], json.dumps(task.metadata["options"], sort_keys=True))
    try:
        score = float(score_answer(answer, entry))
    except Exception as error:
        # Several datasets raise on text they cannot parse. Where the gold answer passes, the text is at fault;
        # where that raises as well, this is a defect of the grader.
        score_answer(entry["answer"], entry)
        return Score(0.0, f"malformed ({type(error).__name__}: {error})")
    return Score(_credit(task, score), f"score {score:.3g}, expected {entry['answer']}")
