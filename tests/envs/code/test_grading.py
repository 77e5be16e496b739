"""A grade comes of what a program computes, and of nothing else that it does."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.envs.code import harness
from rlx.envs.code.grading import CodeGrader, CodeTests, code_of
from rlx.envs.code.tasks import KINDS, Functions, hidden_tests, make_functions, read_human_eval
from rlx.envs.grading import Grade, Outcome
from rlx.sandbox.base import Sandbox
from rlx.sandbox.pool import Sandboxes
from tests.envs.code.forgeries import FORGERIES

LIMITS = SandboxLimits(
    wall_s=20.0,
    cpu_s=4.0,
    cores=1.0,
    memory_bytes=96 << 20,
    processes=16,
    file_bytes=4 << 20,
    disk_bytes=8 << 20,
    files=100,
    output_bytes=1 << 16,
)
CONFIG = SandboxConfig(
    kind="bubblewrap", max_open=8, max_running=4, directory="", read_only=(), url="", api_key="", limits=LIMITS
)
ADD = CodeTests(
    "add",
    "",
    """
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(-1, 1.5) == 0.5
    assert add(2, b=2) == 4
""",
)


def graded(*wanted: tuple[str, CodeTests], partial_credit: bool = False) -> list[Grade]:
    """The grades of (program, tests), several at once."""

    async def grade_all() -> list[Grade]:
        async with Sandboxes(CONFIG) as sandboxes:

            async def opened(files: Mapping[str, bytes]) -> Sandbox:
                return await sandboxes.open(files=files)

            grader = CodeGrader(opened, call_s=1.0)
            grades = [grader.grade(program, tests, partial_credit=partial_credit) for program, tests in wanted]
            return list(await asyncio.gather(*grades))

    return asyncio.run(grade_all())


def test_programs_are_graded_by_their_answers():
    right, wrong = graded(("def add(a, b): return a + b", ADD), ("def add(a, b): return abs(a + b) + (b == 1.5)", ADD))
    assert (right.reward, right.outcome) == (1.0, Outcome.GRADED), right.detail
    assert (wrong.reward, wrong.outcome) == (0.0, Outcome.GRADED)
    assert "2 of 3 assertions hold; candidate(-1, 1.5) == 0.5" in wrong.detail


def test_partial_credit_is_the_share_of_assertions_also_where_a_call_crashes():
    programs = (
        "def add(a, b):\n    if b == 1.5: raise ValueError\n    return a + b",
        "import os\ndef add(a, b): os._exit(1)",
    )
    some, none = graded(*((program, ADD) for program in programs), partial_credit=True)
    assert (some.reward, some.outcome) == (pytest.approx(2 / 3), Outcome.GRADED)
    assert "ValueError raised by the program" in some.detail
    assert (none.reward, none.outcome) == (0.0, Outcome.GRADED)
    assert "exit code 1" in none.detail


@pytest.mark.slow
def test_tests_that_cannot_judge_are_errors_and_not_grades():
    good = "def add(a, b): return a + b"
    empty, broken, endless, deep = graded(
        (good, CodeTests("add", "", "def check(candidate): candidate(1, 1)")),
        (good, CodeTests("add", "", "def check(candidate) assert False")),
        (good, CodeTests("add", "", "def check(candidate):\n    while True: pass")),
        (
            good,
            CodeTests("add", "", "def check(f):\n    x = 1\n    for _ in range(9): x = f(x, f(x, 1))\n    assert x"),
        ),
    )
    assert [g.outcome for g in (empty, broken, endless, deep)] == [*[Outcome.ERROR] * 2, Outcome.TIMEOUT, Outcome.ERROR]
    for grade, said in ((empty, "assert nothing"), (broken, "SyntaxError"), (endless, "limit"), (deep, "times over")):
        assert grade.reward == 0.0
        assert said in grade.detail


@pytest.mark.slow
def test_no_forgery_is_worth_anything():
    grades = graded(*((program, ADD) for program in FORGERIES.values()), partial_credit=True)
    got = {name: (g.reward, g.outcome, g.detail) for name, g in zip(FORGERIES, grades)}
    assert all(reward == 0 and outcome == Outcome.GRADED for reward, outcome, _ in got.values()), got
    assert all(detail for _, _, detail in got.values())


CHOSEN = (0, 32, 33, 38, 50, 51, 163)  # helpers in the prompt, drawn arguments, the function's own name in the tests


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(CHOSEN, marks=pytest.mark.slow), pytest.param(range(164), marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_human_evals_own_solutions_pass_and_stubs_do_not(numbers):
    tasks = read_human_eval("he")
    chosen = [tasks[number] for number in numbers]
    right = graded(*((task.metadata["solution"], hidden_tests(task)) for task in chosen))
    stubs = graded(*((task.metadata["context"] + "    return None\n", hidden_tests(task)) for task in chosen))
    assert [grade.reward for grade in right] == [1.0] * len(chosen), right
    assert [(grade.reward, grade.outcome) for grade in stubs] == [(0.0, Outcome.GRADED)] * len(chosen), stubs


def test_a_function_that_raises_passes_no_assertion_of_human_eval():
    for task in read_human_eval("he"):
        given = {**dataclasses.asdict(hidden_tests(task)), "answers": []}
        while (verdict := harness.judge(given))["calls"]:
            given["answers"] += [(asked, {"raised": "ValueError"}) for asked in verdict["calls"]]
        assert verdict["passed"] == 0 < verdict["failed"] + bool(verdict["broken"]), (task.id, verdict)


def test_what_a_crash_kept_the_tests_from_asserting_has_failed():
    early = CodeTests(
        "add", "", "def check(f):\n    assert f(1, 1) == 2\n    x = f(0, 1)\n    assert x\n    assert x == 1"
    )
    (grade,) = graded(("def add(a, b): return a / (a > 0) + b", early), partial_credit=True)
    assert grade.reward == pytest.approx(1 / 3), grade.detail


def test_our_own_tasks_agree_with_their_references():
    tasks = make_functions("f", {"tests": 12}, 60, 3)
    for task in tasks:
        space: dict = {}
        exec(task.metadata["solution"] + task.metadata["test"], space)
        space["check"](space["solve"])
        with pytest.raises(AssertionError):
            space["check"](lambda *arguments: "no answer")
        assert task.metadata["test"] not in task.question
    assert {task.question for task in make_functions("f", {"tests": 12}, 60, 3)} == {task.question for task in tasks}
    asked = {
        word for kind in KINDS.values() for word in [kind.text.split("{")[0]] if any(word in t.question for t in tasks)
    }
    assert len(asked) == len(KINDS)


def test_options_of_our_own_tasks_are_checked():
    with pytest.raises(ValueError, match=r"kinds = .*'nonsense'.*some of select"):
        Functions(kinds=("nonsense",))
    with pytest.raises(ValueError, match="tests = 0"):
        Functions(tests=0)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(scalars, inner, max_size=3)
        | st.frozensets(scalars, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_values_survive_and_keep_their_types(value):
    back = harness.decode(json.loads(json.dumps(harness.encode(value))))
    assert (back, type(back)) == (value, type(value))
    if isinstance(value, (list, tuple)):
        assert [type(item) for item in back] == [type(item) for item in value]


@pytest.mark.parametrize("said", [{"int": 5}, {"nonsense": 1}, [1], {"list": [[]]}, {"int": "1", "float": "1"}, 7])
def test_what_is_no_encoded_value_is_refused(said):
    with pytest.raises((harness.NotPlain, KeyError, TypeError, ValueError)):
        harness.decode(said)


def test_the_program_is_the_last_block_of_a_response():
    assert code_of("First\n```python\na = 1\n```\nthen\n```\nb = 2\n```\n") == "b = 2\n"
    assert code_of("def f(): pass") is None
