import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import time

import pytest

from rlx.config.schema import GraderConfig
from rlx.envs.graders import GraderPool, check_gold_answers
from rlx.envs.grading import Outcome
from rlx.types import Task
from tests.envs.scores import misbehave

TASK = Task("s/0", "s", "question", "7", "number")


def config(workers=1, timeout_s=2.0, extract="all"):
    return GraderConfig(workers=workers, timeout_s=timeout_s, extract=extract)


@pytest.fixture(scope="module")
def bad_pool():
    """One process, so that whatever happened to it would show in the next grading."""
    with GraderPool(config(), graders=(), score=misbehave) as pool:
        yield pool


@pytest.mark.parametrize(
    "text, outcome, detail",
    [
        ("hang", Outcome.TIMEOUT, "no answer within 2 s"),
        ("hang in C", Outcome.TIMEOUT, "no answer within 2 s"),
        ("exit", Outcome.ERROR, "WorkerDied: the worker process ended with exit code 7"),
        ("raise", Outcome.ERROR, "KeyError: 'a defect'"),
        ("nan", Outcome.ERROR, "ValueError: the reward is nan"),
        ("fine", Outcome.GRADED, "fine"),
    ],
)
def test_every_outcome_is_a_grade_and_the_pool_goes_on(bad_pool, text, outcome, detail):
    got = bad_pool.grade(TASK, text).result(timeout=300)
    assert (got.outcome, got.detail) == (outcome, detail)
    assert got.reward == (1.0 if outcome == Outcome.GRADED else 0.0)
    assert bad_pool.grade(TASK, "next").result(timeout=300).outcome == Outcome.GRADED


def test_a_worker_killed_while_idle_is_replaced(bad_pool):
    first = int(bad_pool.grade(TASK, "pid").result(timeout=300).detail)
    os.kill(first, signal.SIGKILL)
    # The kernel may take a moment; a grading that meets the dying process is an error, never a hang.
    again = [bad_pool.grade(TASK, "pid").result(timeout=300) for _ in range(2)][-1]
    assert again.outcome == Outcome.GRADED
    assert int(again.detail) != first


def test_a_task_that_cannot_be_sent_is_an_error(bad_pool):
    unpicklable = Task("s/0", "s", "question", "7", "number", {"function": lambda: None})
    assert bad_pool.grade(unpicklable, "7").result(timeout=300).outcome == Outcome.ERROR
    assert bad_pool.grade(TASK, "next").result(timeout=300).outcome == Outcome.GRADED


def test_workers_import_no_jax(bad_pool):
    modules = bad_pool.grade(TASK, "modules").result(timeout=300).detail.split()
    assert "rlx.envs.grading" in modules
    assert not {"jax", "torch", "grain", "reasoning_gym"} & set(modules)


def test_a_cancelled_grading_is_skipped(bad_pool):
    running, waiting = bad_pool.grade(TASK, "hang"), bad_pool.grade(TASK, "fine")
    assert waiting.cancel()
    assert running.result(timeout=300).outcome == Outcome.TIMEOUT
    assert bad_pool.grade(TASK, "next").result(timeout=300).outcome == Outcome.GRADED


def test_closing_neither_waits_for_a_hanging_grader_nor_leaves_a_future_open():
    with GraderPool(config(timeout_s=600), graders=(), score=misbehave) as pool:
        pid = int(pool.grade(TASK, "pid").result(timeout=300).detail)
        running, waiting = pool.grade(TASK, "hang"), pool.grade(TASK, "fine")
        while not running.running():
            time.sleep(0.01)
    assert running.result(timeout=300).outcome == Outcome.ERROR
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(timeout=300)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="the grader pool is closed"):
        pool.grade(TASK, "fine")


def test_all_graders_agree_with_asyncio_and_check_their_gold_answers():
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
    tasks = [
        Task("number/0", "number", "1 + 2?", "3", "number"),
        Task("math/0", "math", "1 + 2?", "\\frac{6}{2}", "math_verify"),
        Task("gym/0", "gym", "1 + 2?", "3", "reasoning_gym", {"dataset": "chain_sum", "options": {}, "entry": entry}),
    ]
    words = Task("words/0", "words", "A colour?", "blue", "exact")

    async def rewards(pool, text):
        grades = await asyncio.gather(*(asyncio.wrap_future(pool.grade(task, text)) for task in tasks))
        assert {grade.outcome for grade in grades} == {Outcome.GRADED}, grades
        return [grade.reward for grade in grades]

    with GraderPool(config(workers=2, timeout_s=60, extract="last_number")) as pool:
        assert asyncio.run(rewards(pool, "1 + 2 equals 3.")) == [1, 1, 1]
        assert asyncio.run(rewards(pool, "1 + 2 equals 4.")) == [0, 0, 0]
        check_gold_answers(pool, tasks)
        with pytest.raises(ValueError, match=r"words/0: its own answer 'blue' gets reward 0 .* tasks.sources.words"):
            check_gold_answers(pool, [*tasks, words])


def test_every_cheap_gold_answer_is_checked():
    """Not only the first ones of a source: a mixed file fails later."""
    tasks = [Task(f"mixed/{i}", "mixed", f"{i}?", "3", "number") for i in range(20)]
    with GraderPool(config(timeout_s=60, extract="last_number"), graders=()) as pool:
        check_gold_answers(pool, tasks)
        with pytest.raises(ValueError, match=r"mixed/20: its own answer 'Paris' gets reward 0"):
            check_gold_answers(pool, [*tasks, Task("mixed/20", "mixed", "Capital?", "Paris", "exact")])


@pytest.mark.parametrize("extract", ["tagged", "all"])
def test_gold_answers_are_checked_in_the_form_that_is_extracted(extract):
    tasks = [Task("a/0", "a", "A colour?", "blue", "exact"), Task("b/0", "b", "A pair?", "(1,2)", "math_verify")]
    with GraderPool(config(timeout_s=60, extract=extract), graders=()) as pool:
        check_gold_answers(pool, tasks)
        with pytest.raises(
            ValueError, match=r"c/0: its own answer 'one' .* \(ValueError: the gold answer 'one' is not"
        ):
            check_gold_answers(pool, [Task("c/0", "c", "One?", "one", "number")])


def test_a_grader_that_cannot_start_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"a grader could not start .*exit code 1"), GraderPool(config()):
        pass


@pytest.mark.parametrize("change, named", [({"workers": 0}, "workers = 0"), ({"timeout_s": 0.0}, "timeout_s = 0.0")])
def test_senseless_settings_are_refused(change, named):
    with pytest.raises(ValueError, match=f"grader.{named}"):
        GraderPool(config(**change))


def test_a_script_without_a_main_guard_can_use_the_pool(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from rlx.config.schema import GraderConfig\nfrom rlx.envs.graders import GraderPool\n"
        "from rlx.types import Task\nprint('once')\n"
        "with GraderPool(GraderConfig(1, 30.0, 'all'), graders=()) as pool:\n"
        "    print(pool.grade(Task('s/0', 's', 'q', '7', 'number'), '7').result().reward)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=400)
    assert run.stdout.split() == ["once", "1.0"], run.stderr
