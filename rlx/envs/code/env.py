"""A task of writing a function: programs may be tried in a sandbox first, hidden tests judge the last word."""

from __future__ import annotations

import asyncio

from rlx.envs.code.grading import CodeGrader, code_of
from rlx.envs.code.tasks import hidden_tests
from rlx.envs.env import Step, Tool, ToolCall
from rlx.envs.grading import Grade, Outcome, partial_credit
from rlx.envs.python_tool import OpenSandbox, report
from rlx.sandbox.base import Sandbox
from rlx.types import Task

# Not named `python`: where calls are fenced blocks (tools.format = "plain"), a ```python block is the answer.
RUN = Tool("run_python", "Runs a Python program, to try it, and shows what it prints", {"code": "the program"})


class CodeEnv:
    """An `Env`. Graded is the last fenced block of the last word; where there is none, the last program that was tried.

    The sandbox in which programs are tried is never one in which they are graded.

    Args:
      open_sandbox: called with the first program that is tried. call_seconds: that one may take.
    """

    tools = (RUN,)

    def __init__(self, task: Task, grader: CodeGrader, open_sandbox: OpenSandbox, call_seconds: float):
        self._task, self._grader, self._open_sandbox, self._call_seconds = task, grader, open_sandbox, call_seconds
        self._sandbox: Sandbox | None = None
        self._program = ""

    async def reset(self) -> str:
        return self._task.question

    async def step(self, action: str | ToolCall) -> Step:
        if isinstance(action, str):
            self._program = code_of(action) or self._program or action
            return Step("", done=True)
        self._program = action.arguments["code"]
        if self._sandbox is None:
            self._sandbox = await self._open_sandbox({})
        await self._sandbox.write("program.py", self._program.encode(errors="replace"))
        execution = await self._sandbox.run(["python3", "program.py"], timeout_s=self._call_seconds)
        return Step(report(execution), seconds=execution.seconds)

    async def grade(self) -> Grade:
        await self.close()  # its place is free for the sandboxes of the tests
        if not self._program.strip():
            return Grade(0.0, "", "no program was given", 0.0, Outcome.GRADED)
        partly = partial_credit(self._task)
        return await self._grader.grade(self._program, hidden_tests(self._task), partial_credit=partly)

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await asyncio.shield(sandbox.close())
