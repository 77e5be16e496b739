"""A task that the policy may write Python programs for: a sandbox runs them, the answer is its last word."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping

from rlx.envs.env import Step, Tool, ToolCall
from rlx.envs.grading import Grade, Outcome, partial_credit
from rlx.sandbox.base import Execution, Limit, Sandbox
from rlx.types import Task

PYTHON = Tool("python", "Runs a Python program and shows what it prints", {"code": "the program"})
UNANSWERED = 0.5  # of the grade of what a program printed, where the session ended before it was said

OpenSandbox = Callable[[Mapping[str, bytes]], Awaitable[Sandbox]]  # the files of its workspace


class PythonTool:
    """An `Env`. The files in the task's metadata, {"files": {name: text}}, are in the programs' directory.

    With partial credit (`rlx.envs.grading.partial_credit`) a session that a limit ended before its answer is graded by
    what its last program printed, at half the worth.

    Args:
      grade: of a task and an answer. open_sandbox: called with the first program. call_seconds: that one may take.
    """

    tools = (PYTHON,)

    def __init__(
        self,
        task: Task,
        grade: Callable[[Task, str], Awaitable[Grade]],
        open_sandbox: OpenSandbox,
        call_seconds: float,
    ):
        self._task, self._grade, self._open_sandbox, self._call_seconds = task, grade, open_sandbox, call_seconds
        self._sandbox: Sandbox | None = None
        self._answer: str | None = None
        self._printed = ""  # by the last program

    async def reset(self) -> str:
        return self._task.question

    async def step(self, action: str | ToolCall) -> Step:
        if isinstance(action, str):
            self._answer = action
            return Step("", done=True)
        if self._sandbox is None:
            files: Mapping[str, str] = self._task.metadata.get("files", {})
            self._sandbox = await self._open_sandbox({name: text.encode() for name, text in files.items()})
        await self._sandbox.write("program.py", action.arguments["code"].encode(errors="replace"))
        execution = await self._sandbox.run(["python3", "program.py"], timeout_s=self._call_seconds)
        self._printed = execution.stdout.decode(errors="replace").strip()
        return Step(report(execution), seconds=execution.seconds)

    async def grade(self) -> Grade:
        if self._answer:
            return await self._grade(self._task, self._answer)
        if not (partial_credit(self._task) and self._printed):
            return Grade(0.0, "", "no answer was given", 0.0, Outcome.GRADED)
        grade = await self._grade(self._task, self._printed)
        said = f"no answer was given; of what was printed: {grade.detail}"
        return dataclasses.replace(grade, reward=UNANSWERED * grade.reward, detail=said)

    async def close(self) -> None:
        if self._sandbox is not None:
            await asyncio.shield(self._sandbox.close())


def report(execution: Execution) -> str:
    """What a program printed, and why it ended, where that is no success."""
    streams = (execution.stdout, execution.stderr)
    parts = [text for text in (stream.decode(errors="replace").strip() for stream in streams) if text]
    if execution.stopped_by is not None:
        parts.append(f"stopped: {STOPPED[execution.stopped_by]}")
    elif execution.exit_code:
        parts.append(f"exit status {execution.exit_code}")
    return "\n".join(parts) or "(nothing was printed)"


STOPPED: Mapping[Limit, str] = {
    Limit.WALL: "it took too long",
    Limit.CPU: "it used too much CPU time",
    Limit.MEMORY: "it used too much memory",
    Limit.OUTPUT: "it printed too much",
    Limit.DISK: "it wrote too much",
    Limit.FILES: "it made too many files",
}
