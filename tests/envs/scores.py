"""Scoring functions that misbehave, importable by the graders' processes."""

import os
import re
import sys
import time

from rlx.envs.extract import Extract
from rlx.envs.grading import Score
from rlx.types import Task


def misbehave(task: Task, answer: str, mode: Extract) -> Score:
    """The answer says how."""
    match answer:
        case "hang":
            time.sleep(600)
        case "hang in C":
            re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock and handles no signal
        case "exit":
            os._exit(7)
        case "raise":
            raise KeyError("a defect")
        case "nan":
            return Score(float("nan"), "")
        case "pid":
            return Score(1.0, str(os.getpid()))
        case "modules":
            return Score(1.0, " ".join(sorted(sys.modules)))
        case "print":
            print("noise on standard output")
    return Score(1.0, "fine")
