"""Whether a program passes its hidden tests, found out in sandboxes that it cannot get a verdict out of.

The tests run in a sandbox in which the program has never been; the program runs in another, where it is given calls
and gives answers (`rlx.envs.code.harness` says how). It can leave, patch, print and write what it likes: only values
that the tests accept as right ones pass them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.envs.code import harness
from rlx.envs.grading import Grade, Outcome
from rlx.envs.python_tool import OpenSandbox
from rlx.sandbox.base import Execution, PathError, SandboxError, WorkspaceError

HARNESS = Path(harness.__file__).read_bytes()
MAX_ROUNDS = 6  # of calls that depend on the answers to earlier ones
MAX_ANSWERS = 2**20  # bytes of all answers of a round
_FENCE = re.compile(r"^```[ \t]*(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class CodeTests:
    """Hidden tests of one function."""

    entry: str  # its name
    context: str  # code whose names the tests use
    test: str  # code that defines check(candidate), whose assertions are counted


class TestsBroken(RuntimeError):
    """The tests, not the program, are at fault."""


def code_of(text: str) -> str | None:
    """The program in a response, its last fenced block; None where there is none."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else None


class CodeGrader:
    """Grades programs; what a function's tests ask first, which is the same for every program, is asked once.

    call_s: CPU seconds that one call of the function may take.
    """

    def __init__(self, open_sandbox: OpenSandbox, call_s: float):
        self._open, self._call_s = open_sandbox, call_s
        self._first: dict[CodeTests, Mapping[str, Any]] = {}

    async def grade(self, program: str, tests: CodeTests, *, partial_credit: bool) -> Grade:
        """The share of assertions that hold, or 1 for all of them and else 0.

        Whatever keeps the tests from being run becomes an ERROR or a TIMEOUT, never a grade.
        """
        start = time.perf_counter()
        reward, outcome = 0.0, Outcome.GRADED
        try:
            reward, detail = await self._judge(program, tests, partial_credit)
        except TimeoutError as error:
            outcome, detail = Outcome.TIMEOUT, str(error)
        except (TestsBroken, SandboxError, PathError) as error:
            outcome, detail = Outcome.ERROR, f"{type(error).__name__}: {error}"
        return Grade(reward, program, detail, time.perf_counter() - start, outcome)

    async def _judge(self, program: str, tests: CodeTests, partial_credit: bool) -> tuple[float, str]:
        """(reward, detail)."""
        if tests not in self._first:
            self._first[tests] = await self._run_tests(tests, [])
        verdict, trouble = self._first[tests], ""
        answers: list[tuple[Any, Any]] = []
        for _ in range(MAX_ROUNDS):
            if not verdict["calls"]:
                return _reward(verdict, trouble, partial_credit)
            given, trouble = await self._run_program(program, tests.entry, verdict["calls"])
            answers += zip(verdict["calls"], given)
            try:
                verdict = await self._run_tests(tests, answers)
            except TimeoutError as error:  # which they were not before its answers: values made to take for ever
                return 0.0, f"with the program's answers, {error}; {trouble}"
        raise TestsBroken(f"their calls depend on answers more than {MAX_ROUNDS} times over")

    async def _run_tests(self, tests: CodeTests, answers: Sequence[tuple[Any, Any]]) -> Mapping[str, Any]:
        given = {**dataclasses.asdict(tests), "answers": answers}
        sandbox = await self._open({"code_harness.py": HARNESS, "tests.json": json.dumps(given).encode()})
        try:
            execution = await sandbox.run(["python3", "-I", "-S", "code_harness.py", "tests"])
            if execution.stopped_by is not None:
                raise TimeoutError(f"the tests were stopped by the sandbox's limit {execution.stopped_by!s}")
            if execution.exit_code != 0:
                raise TestsBroken(_last_words(execution))
            verdict: Mapping[str, Any] = json.loads(await sandbox.read("verdict.json"))
            return verdict
        finally:
            await sandbox.close()

    async def _run_program(self, program: str, entry: str, calls: Sequence[Any]) -> tuple[list[Any], str]:
        """(an answer to each call, what went wrong)."""
        asked = {"entry": entry, "calls": calls, "call_s": self._call_s}
        files = {"code_harness.py": HARNESS, "calls.json": json.dumps(asked).encode()}
        try:
            sandbox = await self._open({**files, "solution.py": program.encode(errors="replace")})
        except WorkspaceError as error:
            return [_raised("NoAnswer")] * len(calls), f"the program has no room in its workspace: {error}"
        try:
            execution = await sandbox.run(["python3", "-I", "code_harness.py", "program"])
            said = await sandbox.read("answers.jsonl")
        except (FileNotFoundError, PathError, WorkspaceError) as error:  # the program has removed or replaced it
            return [_raised("NoAnswer")] * len(calls), f"the program left no answers: {error}"
        finally:
            await sandbox.close()
        answers = _read_answers(said)[: len(calls)]
        if len(answers) == len(calls):
            return answers, ""
        by = execution.stopped_by
        trouble = f"the program was stopped by the sandbox's limit {by!s}" if by else _last_words(execution)
        return answers + [_raised("NoAnswer")] * (len(calls) - len(answers)), trouble


def _reward(verdict: Mapping[str, Any], trouble: str, partial_credit: bool) -> tuple[float, str]:
    """(reward, detail). Where a call that raised ended the test code early, what it never came to has failed, too."""
    passed, broken = verdict["passed"], bool(verdict["broken"])
    total = passed + verdict["failed"] + broken
    if broken:
        total = max(total, verdict["assertions"])
    if total == 0:
        raise TestsBroken("the tests assert nothing")
    share = passed / total
    said = [f"{passed} of {total} assertions hold", verdict["said"] or verdict["broken"], trouble]
    return share if partial_credit else float(share == 1.0), "; ".join(text for text in said if text)


def _read_answers(said: bytes) -> list[Any]:
    """The program may have written anything; what is no answer counts as one that raised."""
    if len(said) > MAX_ANSWERS:
        return []
    return [_read_answer(line) for line in said.split(b"\n")[:-1]]


def _read_answer(line: bytes) -> Any:
    """Only its form is looked at here; its value is made of it in the tests' sandbox."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
        if isinstance(answer, dict) and answer.keys() == {"value"}:
            return answer
        if isinstance(answer, dict) and answer.keys() == {"raised"} and isinstance(answer["raised"], str):
            return answer
    return _raised("NoAnswer")


def _raised(name: str) -> dict[str, str]:
    return {"raised": name}


def _last_words(execution: Execution) -> str:
    words = execution.stderr.decode(errors="replace").strip().splitlines()
    return f"exit code {execution.exit_code}: {words[-1][:300] if words else 'nothing was said'}"
