"""The python-tool environment: programs in a sandbox, the answer in the last word, work so far where a limit came."""

import asyncio

import pytest

from rlx.envs.env import ToolCall
from rlx.envs.grading import Grade, Outcome, score_answer
from rlx.envs.python_tool import PythonTool, report
from rlx.sandbox.base import Execution, Limit
from rlx.types import Task

FILES = {"data.csv": "a,b\n1,2\n"}


class FakeSandbox:
    """A program "prints" its own text."""

    def __init__(self, files):
        self.files, self.closed, self.timeouts = dict(files), 0, []

    async def write(self, path, data):
        self.files[path] = data

    async def run(self, command, *, stdin=b"", timeout_s=None, env=None):
        self.timeouts.append(timeout_s)
        assert command == ["python3", "program.py"]
        return Execution(0, self.files["program.py"], b"", 0.25)

    async def close(self):
        self.closed += 1


class Opened:
    def __init__(self):
        self.sandboxes = []

    async def __call__(self, files):
        self.sandboxes.append(FakeSandbox(files))
        return self.sandboxes[-1]


async def graded(task, text):
    score = score_answer(task, text, "all")
    return Grade(score.reward, text, score.detail, 0.0, Outcome.GRADED)


def make(opened, **metadata):
    task = Task("t/0", "t", "What?", "7, 9", "numbers", metadata)
    return PythonTool(task, graded, opened, call_seconds=3.0)


def call(code):
    return ToolCall("python", {"code": code})


def test_a_program_runs_beside_the_tasks_files_and_the_last_word_is_graded():
    async def main():
        opened = Opened()
        env = make(opened, files=FILES)
        assert await env.reset() == "What?"
        step = await env.step(call("7 9"))
        assert (step.observation, step.done, step.seconds) == ("7 9", False, 0.25)
        await env.step(call("again"))
        assert (await env.step("7, 9")).done
        grade = await env.grade()
        await env.close()
        (sandbox,) = opened.sandboxes
        assert sandbox.files == {"data.csv": b"a,b\n1,2\n", "program.py": b"again"}
        assert (sandbox.timeouts, sandbox.closed) == ([3.0, 3.0], 1)
        return grade

    assert asyncio.run(main()).reward == 1.0


def test_who_runs_nothing_needs_no_sandbox():
    async def main():
        opened = Opened()
        env = make(opened)
        await env.step("7, 9")
        await env.close()
        return opened.sandboxes, await env.grade()

    sandboxes, grade = asyncio.run(main())
    assert sandboxes == []
    assert grade.reward == 1.0


@pytest.mark.parametrize(
    "partial, printed, reward", [(False, "7 9", 0.0), (True, "7 9", 0.5), (True, "7 8", 0.25), (True, "", 0.0)]
)
def test_a_session_without_an_answer_is_graded_on_its_work_so_far(partial, printed, reward):
    async def main():
        env = make(Opened(), partial_credit=partial)
        await env.step(call(printed))
        return await env.grade()

    grade = asyncio.run(main())
    assert grade.reward == reward
    assert grade.outcome == Outcome.GRADED
    assert grade.detail.startswith("no answer was given")


@pytest.mark.parametrize(
    "execution, said",
    [
        (Execution(0, b"5\n", b"", 0.1), "5"),
        (Execution(0, b"", b"", 0.1), "(nothing was printed)"),
        (Execution(1, b"5\n", b"Traceback\n", 0.1), "5\nTraceback\nexit status 1"),
        (Execution(137, b"", b"", 9.0, Limit.WALL), "stopped: it took too long"),
        (Execution(0, b"\xff", b"", 0.1), "\ufffd"),
    ],
)
def test_what_a_program_did_is_said(execution, said):
    assert report(execution) == said
