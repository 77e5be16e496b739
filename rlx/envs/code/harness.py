"""What runs inside sandboxes to grade code: `python3 code_harness.py program | tests`. It knows nothing of rlx.

The program under test and its hidden tests never share a process nor a workspace. In one sandbox `tests` runs the
test code against a stand-in that only notes the calls; in another `program` answers those calls, and is told neither
what is expected nor what the tests do with it; then `tests` runs again with the answers. All that passes between them
are plain values (`encode`), so nothing that the program returns can compare equal to what it is not.

calls.json     {"entry": name, "calls": [[arguments, {name: argument}], ...], "call_s": CPU seconds of one call}
answers.jsonl  a line for each call: {"value": encoded} or {"raised": the name of the exception}
tests.json     {"entry": name, "context": code, "test": code of check(candidate), "answers": [[call, answer], ...]}
verdict.json   {"calls": [those without an answer], "passed": n, "failed": n, "said": of the first failure,
               "broken": what ended the test code early, or "", "assertions": so many the text has}
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import signal
import sys
from typing import Any

MAX_DEPTH = 50
MAX_SAID = 300  # characters
CLOCK = 5  # seconds by the clock for a CPU second
SEED = 0  # tests that draw make the same calls each time


class NotPlain(Exception):
    """A value that is not made of plain types, or is nested too deeply."""


def encode(value, depth=0):
    """JSON that keeps apart what Python keeps apart: 1, 1.0 and True; lists, tuples and sets."""
    if depth > MAX_DEPTH:
        raise NotPlain("a value nested too deeply")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(item, depth + 1) for item in value]}
    if kind is dict:
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    raise NotPlain(f"a value of the type {kind.__name__}, which is not a plain one")


def decode(said, depth=0):
    """Raises ValueError, TypeError or NotPlain for what `encode` does not make."""
    if said is None or type(said) in (bool, str):
        return said
    if depth > MAX_DEPTH or type(said) is not dict or len(said) != 1:
        raise NotPlain("not an encoded value")
    ((kind, inner),) = said.items()
    if kind in SCALARS:
        return SCALARS[kind](inner)
    if kind == "dict":
        return {decode(k, depth + 1): decode(v, depth + 1) for k, v in inner}
    make = COLLECTIONS[kind]
    return make([decode(item, depth + 1) for item in inner])


SCALARS: dict[str, Any] = {
    "int": lambda said: int(said, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "complex": lambda said: complex(float.fromhex(said[0]), float.fromhex(said[1])),
}
COLLECTIONS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode_call(arguments, named):
    return [[encode(a) for a in arguments], {name: encode(a) for name, a in sorted(named.items())}]


# ---------------------------------------------------------------- the program's side


def run_program():
    """Answers the calls, one line each as it is made: what comes after a crash is missing, what came before counts."""
    with open("calls.json", encoding="utf-8") as file:
        asked = json.load(file)
    signal.signal(signal.SIGPROF, _too_long)
    signal.signal(signal.SIGALRM, _too_long)
    with open("solution.py", encoding="utf-8") as file, open("answers.jsonl", "w", encoding="utf-8") as answers:
        space = {"__name__": "solution"}
        exec(compile(file.read(), "solution.py", "exec"), space)
        for arguments, named in asked["calls"]:
            _give(asked["call_s"])
            answer = _answer(space.get(asked["entry"]), arguments, named)
            _give(0)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _give(seconds):
    """So many of the CPU; more by the clock, which a busy machine uses up by itself."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, CLOCK * seconds)


def _too_long(number, frame):
    raise TimeoutError("the call took too long")


def _answer(function, arguments, named):
    try:
        return {"value": encode(function(*map(decode, arguments), **{k: decode(v) for k, v in named.items()}))}
    except BaseException as error:
        return {"raised": type(error).__name__}


# ---------------------------------------------------------------- the tests' side


class Unanswered:
    """What a call without an answer returns: the test code goes on as far as it can, and finds its other calls."""


class Verdict:
    def __init__(self, answers):
        self.answers = {json.dumps(call): answer for call, answer in answers}
        self.calls = {}  # without an answer, in their order
        self.passed = self.failed = 0
        self.said = self.broken = ""

    def candidate(self, *arguments, **named):
        """Stands for the program's function."""
        call = encode_call(arguments, named)
        answer = self.answers.get(json.dumps(call))
        if answer is None:
            self.calls[json.dumps(call)] = call
            return Unanswered()
        if "raised" in answer:
            raise _exception(answer["raised"])
        try:
            return decode(answer["value"])
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, NotPlain) as error:
            raise RuntimeError("the program's answer is no value") from error

    def passes(self):
        self.passed += 1

    def fails(self, error, text):
        self.failed += 1
        self.said = self.said or f"{text[:MAX_SAID]}: {type(error).__name__} {error}"[: 2 * MAX_SAID]


def _exception(name):
    kind = getattr(builtins, str(name), None)
    ordinary = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
    return kind("raised by the program") if ordinary else RuntimeError(f"the program raised {str(name)[:100]}")


class Counted(ast.NodeTransformer):
    """Every assertion counts on its own, and the code goes on after one that fails; `assert True` counts not."""

    def __init__(self):
        self.assertions = 0

    def visit_Assert(self, node):
        if isinstance(node.test, ast.Constant):
            return node
        self.assertions += 1
        fails = ast.parse(f"verdict__.fails(error__, {ast.unparse(node.test)!r})").body
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "error__", fails)
        attempt = ast.Try([node], [handler], ast.parse("verdict__.passes()").body, [])
        return ast.fix_missing_locations(ast.copy_location(attempt, node))


def run_tests():
    with open("tests.json", encoding="utf-8") as file:
        given = json.load(file)
    with open("verdict.json", "w", encoding="utf-8") as file:
        json.dump(judge(given), file)


def judge(given):
    """The verdict, see above, on the answers in `given`, which is as tests.json."""
    verdict, counted = Verdict(given["answers"]), Counted()
    random.seed(SEED)
    space: dict[str, Any] = {"__name__": "tests", "verdict__": verdict}
    exec(compile(given["context"], "context.py", "exec"), space)
    space[given["entry"]] = verdict.candidate  # some tests use the function's own name
    exec(compile(counted.visit(ast.parse(given["test"])), "tests.py", "exec"), space)
    try:
        space["check"](verdict.candidate)
    except Exception as error:
        verdict.broken = f"{type(error).__name__}: {error}"[:MAX_SAID]
    numbers = {"passed": verdict.passed, "failed": verdict.failed, "assertions": counted.assertions}
    return {**numbers, "calls": list(verdict.calls.values()), "said": verdict.said, "broken": verdict.broken}


if __name__ == "__main__":
    if sys.argv[1] == "program":
        run_program()
    else:
        run_tests()
