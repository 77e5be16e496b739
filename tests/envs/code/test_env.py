from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from configs import base
from rlx.config.parse import plain
from rlx.config.schema import TaskSourceConfig
from rlx.envs.code.env import CodeEnv
from rlx.envs.code.grading import CodeGrader
from rlx.envs.code.tasks import make_functions
from rlx.envs.env import ToolCall
from rlx.envs.grading import Grade, Outcome
from rlx.envs.sources import check_source, read_source
from rlx.envs.tool_calls import parse_calls
from rlx.sandbox.base import Sandbox
from rlx.sandbox.pool import Sandboxes
from tests.envs.code.test_grading import CONFIG

TASK = make_functions("f", {}, 1, 0)[0]
SOLUTION = TASK.metadata["solution"]


def session(*actions: str | ToolCall) -> tuple[list[str], Grade, int]:
    """(what was told, the grade, sandboxes left open)"""

    async def act() -> tuple[list[str], Grade, int]:
        async with Sandboxes(CONFIG) as sandboxes:

            async def opened(files: Mapping[str, bytes]) -> Sandbox:
                return await sandboxes.open(files=files)

            env = CodeEnv(TASK, CodeGrader(opened, 1.0), opened, call_seconds=5.0)
            assert await env.reset() == TASK.question
            told = [(await env.step(action)).observation for action in actions]
            grade = await env.grade()
            await env.close()
            return told, grade, sandboxes.open_now

    return asyncio.run(act())


def call(code: str) -> ToolCall:
    return ToolCall("run_python", {"code": code})


def test_a_program_is_tried_and_the_last_word_graded():
    told, grade, left = session(call("print(6 * 7)"), f"Here it is:\n```python\n{SOLUTION}```")
    assert told == ["42", ""]
    assert (grade.reward, grade.outcome, left) == (1.0, Outcome.GRADED, 0), grade.detail


def test_a_session_without_a_last_word_is_graded_by_its_last_program():
    _, grade, left = session(call(SOLUTION))
    assert (grade.reward, left) == (1.0, 0), grade.detail


def test_nothing_is_worth_nothing_and_says_so():
    _, grade, left = session()
    assert (grade.reward, grade.outcome, grade.detail, left) == (0.0, Outcome.GRADED, "no program was given", 0)


def test_in_fenced_blocks_a_program_that_is_tried_is_not_the_answer():
    answer = f"Here it is:\n```python\n{SOLUTION}```"
    assert parse_calls("plain", answer, CodeEnv.tools) == []
    (tried,) = parse_calls("plain", "```run_python\nprint(1)\n```", CodeEnv.tools)
    assert tried == call("print(1)")


def source(**changes) -> TaskSourceConfig:
    return TaskSourceConfig(**plain(base.source(**{"environment": "code", "size": 3, **changes})))


def test_sources_of_code_give_tasks_with_hidden_tests():
    for dataset, number in (("functions", 3), ("human_eval", 164)):
        chosen = source(dataset=dataset, partial_credit=True)
        check_source("code", chosen)
        tasks = read_source("code", chosen, 0)
        assert len(tasks) == number
        assert all(task.grader == "code" and task.answer is None and task.metadata["partial_credit"] for task in tasks)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dataset": "human_eval", "environment": ""}, "environment 'code' and the datasets human_eval and functions"),
        ({"dataset": "arithmetic"}, "environment 'code' and the datasets human_eval and functions go together"),
        ({"dataset": "functions", "grader": "exact"}, "graded by its hidden tests; set ''"),
        ({"dataset": "functions", "options": {"test": 3}}, "did you mean 'tests'?"),
        ({"dataset": "functions", "options": {"kinds": ["rotat"]}}, "kinds = .*rotat.*: some of select"),
        ({"dataset": "functions", "size": 0}, "at least 1 task"),
        ({"dataset": "human_eval", "options": {"tests": 3}}, "not an option of human_eval; it has none"),
    ],
)
def test_sources_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        check_source("code", source(**changes))
