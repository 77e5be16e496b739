"""Tasks that a program helps with: their answers are right, they repeat, and wrong options are refused."""

import csv
import dataclasses
import io
import re

import pytest

from configs import base
from rlx.config.parse import plain
from rlx.config.schema import TaskSourceConfig
from rlx.envs.grading import score_answer
from rlx.envs.sources import check_source, read_source
from rlx.envs.tool_tasks import ASKED


def source(**changes) -> TaskSourceConfig:
    return TaskSourceConfig(**plain(base.source(**{"environment": "python_tool", "size": 20, **changes})))


def test_arithmetic_is_right():
    tasks = read_source("sums", source(dataset="arithmetic", options={"min_digits": 2}), 0)
    for task in tasks:
        expression = task.question.removeprefix("What is ").removesuffix("?")
        assert task.answer == str(eval(expression))
        assert task.grader == "number"
    assert read_source("sums", source(dataset="arithmetic", options={"min_digits": 2}), 0) == tasks
    assert read_source("sums", source(dataset="arithmetic", options={"min_digits": 2}), 1) != tasks


def test_a_table_is_in_its_file_and_the_answers_are_right():
    for task in read_source("tables", source(dataset="table"), 0):
        rows = list(csv.DictReader(io.StringIO(task.metadata["files"]["data.csv"])))
        asked = re.findall(r"the (sum|largest|smallest|spread) of (\w+)", task.question)
        names = {name.partition(",")[0]: function for name, function in ASKED.items()}
        answers = [names[name]([int(row[column]) for row in rows]) for name, column in asked]
        assert task.answer == ", ".join(map(str, answers))
        assert len(answers) == 2


@pytest.mark.parametrize(
    "answer, whole, partly",
    [
        ("They are 12 and 5", 1, 1),
        ("12, 5", 1, 1),
        ("5 and 12", 0, 0),
        ("12 and 6", 0, 0.5),
        ("12", 0, 0),
        ("first 3, so 12 and 5.0", 1, 1),
    ],
)
def test_of_several_numbers_a_part_may_count(answer, whole, partly):
    task = read_source("t", source(dataset="table", size=1), 0)[0]
    for partial_credit, reward in ((False, whole), (True, partly)):
        metadata = {"partial_credit": partial_credit}
        graded = dataclasses.replace(task, answer="12, 5", metadata=metadata)
        assert score_answer(graded, answer, "all").reward == reward


def test_partial_credit_is_a_key_of_the_source():
    (task,) = read_source("t", source(dataset="table", size=1, partial_credit=True), 0)
    assert task.metadata["partial_credit"] is True
    assert "files" in task.metadata


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dataset": "arithmetic", "options": {"digits": 3}}, "digits is not an option of arithmetic; did you mean"),
        ({"dataset": "arithmetic", "options": {"min_digits": "3"}}, "min_digits = '3': must be int"),
        ({"dataset": "arithmetic", "options": {"min_digits": 9}}, "min_digits = 9, max_digits = 4: 1 to 12"),
        ({"dataset": "arithmetic", "options": {"operations": "/"}}, r"operations = '/': some of '\+-\*'"),
        ({"dataset": "table", "options": {"questions": 9}}, "questions = 9: 1 to 6"),
        ({"dataset": "table", "options": {"min_rows": 0}}, "min_rows = 0, max_rows = 40"),
        ({"dataset": "table", "environment": ""}, "environment = '': a table is in a file; set 'python_tool'"),
        ({"dataset": "table", "grader": "exact"}, "grader = 'exact': table is graded by 'numbers'; set ''"),
        ({"dataset": "tabel"}, "is no dataset of reasoning-gym's or our own; did you mean 'table'"),
    ],
)
def test_what_cannot_be_made_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        check_source("t", source(**changes))
