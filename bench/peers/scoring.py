"""The reward of `work.py` as rlx's grader processes call it. A module of its own: they import it, and need no jax."""

from bench.peers import work
from rlx.envs.extract import Extract
from rlx.envs.grading import Score
from rlx.types import Task


def score(task: Task, text: str, mode: Extract) -> Score:
    return Score(work.share_of_even(text), "")
