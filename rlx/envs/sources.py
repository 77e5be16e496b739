"""Tasks from where they come: a reasoning-gym dataset, one of our own (`rlx.envs.tool_tasks`), functions to be written
(`rlx.envs.code.tasks`), or a JSONL file of {"question", "answer", "grader"?}."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from rlx.config.schema import TaskSourceConfig
from rlx.envs.code.tasks import DATASETS as CODE_DATASETS
from rlx.envs.code.tasks import Functions, make_functions, read_human_eval
from rlx.envs.extract import as_number
from rlx.envs.grading import GRADERS
from rlx.envs.tool_calls import as_characters
from rlx.envs.tool_tasks import KINDS, make_tasks
from rlx.envs.web.tasks import DATASET as WEB_DATASET
from rlx.envs.web.tasks import ENVIRONMENT as WEB_ENVIRONMENT
from rlx.envs.web.tasks import WebTasks
from rlx.types import Task

# Found by scoring nonsense with all datasets of reasoning-gym 0.1.25.
_REFUSED = {
    "game_of_life_halting": "any text at all scores 1.0 there, so a policy learns to write anything",
    "composite": "it has no questions of its own; make each of its datasets an entry of tasks.sources",
}
# Found by generating them in two processes with different hash seeds.
_HASH_DEPENDENT = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
_GOLD_CHECKS = 3  # tasks of a dataset whose own answer is scored at the start


def check_source(name: str, source: TaskSourceConfig) -> None:
    """Refuse a source that cannot be honoured, before anything is generated.

    Raises:
        ValueError: names the key, the value and the nearest valid one.
    """
    key = f"tasks.sources.{name}"
    if bool(source.dataset) == bool(source.path):
        found = "both are set" if source.path else "neither is set"
        raise ValueError(f"{key}: set one of dataset (a reasoning-gym name) and path (a JSONL file); {found}")
    if not (math.isfinite(source.weight) and source.weight > 0):
        raise ValueError(f"{key}.weight = {source.weight}: it must be above 0; remove the source to leave it out")
    if source.grader and source.grader not in GRADERS:
        raise ValueError(f"{key}.grader = {source.grader!r} is not a grader; {nearest(source.grader, GRADERS)}")
    if (source.dataset in CODE_DATASETS) != (source.environment == "code"):
        raise ValueError(
            f"{key}: dataset = {source.dataset!r} with environment = {source.environment!r}: the environment 'code' "
            f"and the datasets {' and '.join(CODE_DATASETS)} go together"
        )
    if bool(source.agent) != (source.environment == "agent"):
        raise ValueError(f"{key}.agent = {source.agent!r}: the environment 'agent' and the agent's command go together")
    if (source.dataset == WEB_DATASET) != (source.environment == WEB_ENVIRONMENT):
        raise ValueError(
            f"{key}: dataset = {source.dataset!r} with environment = {source.environment!r}: the environment "
            f"{WEB_ENVIRONMENT!r} and the dataset {WEB_DATASET!r} go together"
        )
    if source.dataset in KINDS:
        _check_own(key, source)
    elif source.dataset == WEB_DATASET:
        _check_web(key, source)
    elif source.dataset in CODE_DATASETS:
        _check_code(key, source)
    elif source.dataset:
        _check_dataset(key, source)
    else:
        _check_file(key, source)


def read_source(name: str, source: TaskSourceConfig, seed: int) -> list[Task]:
    """All tasks of a source in its own order, questions that repeat included. `check_source` comes before.

    A dataset makes `size` tasks; a file is read whole. A line without a grader gets the source's; where that is ""
    too, "number" if its answer is a number and "exact" otherwise.

    Raises:
        ValueError: the dataset refuses its options or fails; a line of the file is malformed (its number is named).
    """
    if source.dataset in KINDS:
        tasks = make_tasks(name, source.dataset, source.options, source.size, seed)
    elif source.dataset == WEB_DATASET:
        tasks = WebTasks.read(source.options).tasks(name)
    elif source.dataset in CODE_DATASETS:
        human_eval = source.dataset == "human_eval"
        tasks = read_human_eval(name) if human_eval else make_functions(name, source.options, source.size, seed)
    else:
        tasks = _read_dataset(name, source, seed) if source.dataset else _read_file(name, source)
    if not source.partial_credit:
        return tasks
    return [dataclasses.replace(t, metadata={**t.metadata, "partial_credit": True}) for t in tasks]


def _check_web(key: str, source: TaskSourceConfig) -> None:
    if source.grader:
        raise ValueError(f"{key}.grader = {source.grader!r}: web projects have checks of their own; set ''")
    try:
        WebTasks.read(source.options).tasks("")
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{key}.options: {error}") from error


def nearest(value: str, valid: Iterable[str]) -> str:
    """The hint at the end of an error about a wrong name."""
    names = sorted(valid)
    close = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "there are " + ", ".join(names)


def _check_own(key: str, source: TaskSourceConfig) -> None:
    make, grader = KINDS[source.dataset]
    fields = {f.name: type(f.default) for f in dataclasses.fields(make)}
    for option, value in source.options.items():
        if option not in fields:
            raise ValueError(f"{key}.options.{option} is not an option of {source.dataset}; {nearest(option, fields)}")
        if type(value) is not fields[option]:
            raise ValueError(f"{key}.options.{option} = {value!r}: must be {fields[option].__name__}")
    try:
        make(**source.options)
    except ValueError as error:
        raise ValueError(f"{key}.options: {error}") from error
    if source.grader not in ("", grader):
        raise ValueError(f"{key}.grader = {source.grader!r}: {source.dataset} is graded by {grader!r}; set ''")
    if source.dataset == "table" and source.environment != "python_tool":
        raise ValueError(f"{key}.environment = {source.environment!r}: a table is in a file; set 'python_tool'")


def _check_code(key: str, source: TaskSourceConfig) -> None:
    options = {f.name for f in dataclasses.fields(Functions)} if source.dataset == "functions" else set()
    for option in source.options:
        if option not in options:
            known = nearest(option, options) if options else "it has none"
            raise ValueError(f"{key}.options.{option} is not an option of {source.dataset}; {known}")
    if source.grader:
        raise ValueError(f"{key}.grader = {source.grader!r}: {source.dataset} is graded by its hidden tests; set ''")
    if source.dataset == "functions":
        if source.size < 1:
            raise ValueError(f"{key}.size = {source.size}: at least 1 task must be generated")
        try:
            Functions(**source.options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key}.options: {error}") from error


# ---------------------------------------------------------------- reasoning-gym


def _check_dataset(key: str, source: TaskSourceConfig) -> None:
    # It takes a second to import, which who trains on files of their own need not wait for.
    from reasoning_gym.factory import DATASETS

    dataset = source.dataset
    if dataset not in DATASETS:
        known = nearest(dataset, [*DATASETS, *KINDS, *CODE_DATASETS])
        raise ValueError(f"{key}.dataset = {dataset!r} is no dataset of reasoning-gym's or our own; {known}")
    if dataset in _REFUSED:
        raise ValueError(f"{key}.dataset = {dataset!r} is refused: {_REFUSED[dataset]}")
    if dataset in _HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        raise ValueError(
            f"{key}.dataset = {dataset!r} makes other questions in every process, so a resumed run would train on "
            "held-out ones: set the environment variable PYTHONHASHSEED=0, or write the tasks to a JSONL file"
        )
    if source.size < 1:
        raise ValueError(f"{key}.size = {source.size}: at least 1 task must be generated")
    options = {f.name for f in dataclasses.fields(DATASETS[dataset][1])} - {"seed", "size"}
    for option in source.options:
        if option in ("seed", "size"):
            place = "tasks.seed" if option == "seed" else f"{key}.size"
            raise ValueError(f"{key}.options.{option} is not an option: set {place}")
        if option not in options:
            raise ValueError(f"{key}.options.{option} is not an option of {dataset}; {nearest(option, options)}")


def _read_dataset(name: str, source: TaskSourceConfig, seed: int) -> list[Task]:
    import reasoning_gym

    key = f"tasks.sources.{name}"
    options = json.loads(json.dumps(dict(source.options)))  # tuples become lists, as the graders will see them
    # reasoning-gym seeds item i with seed + i: neighbouring seeds, or two sources with one seed, would share items.
    seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1
    try:
        dataset = reasoning_gym.create_dataset(source.dataset, size=source.size, seed=seed, **options)
        entries = [dataset[index] for index in range(source.size)]
        stored = json.loads(json.dumps(entries))
    except Exception as error:
        raise ValueError(
            f"{key}: reasoning-gym's {source.dataset} does not work with options {options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    grader = source.grader or "reasoning_gym"
    for entry in stored[:_GOLD_CHECKS]:
        _check_gold(key, source.dataset, grader, dataset, entry)
    base = {"dataset": source.dataset, "options": options}
    return [
        Task(f"{name}/{index}", name, entry["question"], entry["answer"], grader, {**base, "entry": entry})
        for index, entry in enumerate(stored)
    ]


def _check_gold(key: str, name: str, grader: str, dataset: Any, entry: dict[str, Any]) -> None:
    if entry["answer"] is None:
        if grader != "reasoning_gym":
            raise ValueError(f"{key}.grader = {grader!r} needs a gold answer, which {name} does not give: set ''")
    elif grader == "reasoning_gym" and (score := dataset.score_answer(entry["answer"], entry)) < 1:
        raise ValueError(f"{key}.dataset = {name!r}: its own answer scores {score:.3g}, so no response can be right")


# ---------------------------------------------------------------- JSONL


def _check_file(key: str, source: TaskSourceConfig) -> None:
    if not pathlib.Path(source.path).is_file():
        raise ValueError(f"{key}.path = {source.path!r}: there is no such file (from {os.getcwd()})")
    if source.options:
        raise ValueError(f"{key}.options = {source.options}: options belong to a dataset, a JSONL file has none")
    if source.grader == "reasoning_gym":
        raise ValueError(f"{key}.grader = 'reasoning_gym' grades reasoning-gym datasets only; a file has none")


def _read_file(name: str, source: TaskSourceConfig) -> list[Task]:
    tasks: list[Task] = []
    with open(source.path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                tasks.append(_parse_line(name, number, line, source))
    if not tasks:
        raise ValueError(f"tasks.sources.{name}.path = {source.path!r} holds no tasks")
    return tasks


class _Number(str):
    """A JSON number, as written."""


def _parse_line(name: str, number: int, line: str, source: TaskSourceConfig) -> Task:
    where = f"{source.path}, line {number}"
    try:
        # Numbers stay as they are written: a float would change long ones.
        row = json.loads(line, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno}); each line is one object") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply; each line is one object of texts") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: {type(row).__name__} instead of an object {{"question": ..., "answer": ...}}')
    for key in row:
        if key not in ("question", "answer", "grader"):
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, ('question', 'answer', 'grader'))}")
    question, answer = _text(where, row, "question"), _text(where, row, "answer")
    grader = row.get("grader") or source.grader or ("exact" if as_number(answer) is None else "number")
    if grader not in GRADERS or grader == "reasoning_gym":
        valid = sorted(set(GRADERS) - {"reasoning_gym"})
        raise ValueError(f"{where}: grader {grader!r} cannot grade a line of a file; {nearest(str(grader), valid)}")
    if grader == "number" and as_number(answer) is None:
        raise ValueError(f"{where}: grader 'number' needs a number as the answer, found {answer!r}")
    return Task(f"{name}/{number}", name, question, answer, grader)


def _text(where: str, row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if isinstance(value, _Number) and key == "answer":
        if value.lower().strip("-") in ("nan", "infinity"):
            raise ValueError(f"{where}: the answer {value} is no number")
        return str(value)
    if not isinstance(value, str) or isinstance(value, _Number) or not value.strip():
        state = f"is {value!r}" if key in row else "is missing"
        raise ValueError(f"{where}: {key!r} {state}; it must be a text that is not empty")
    if as_characters(value) != value:
        raise ValueError(f"{where}: {key!r} has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value
