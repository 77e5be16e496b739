"""The tasks of a run, split once into those trained on and those held out for evaluation."""

from __future__ import annotations

import json
import math
import pathlib
import random
from collections.abc import Sequence

from rlx.config.schema import TasksConfig
from rlx.envs.extract import normalise_text
from rlx.envs.sources import check_source, read_source
from rlx.types import Task


def build_tasks(config: TasksConfig) -> tuple[list[Task], list[Task]]:
    """(train, held_out). No question is in both, nor twice in either; the same for the same config in any process.

    Questions that repeat, within a source or between two, are used once (sources in alphabetical order), so a source
    can have fewer tasks than its `size`. The held-out tasks are spread over the sources in proportion to their
    weights; every source keeps at least one task to train on.

    Raises:
        ValueError: a source or a number that cannot be honoured; says which and what would be.
    """
    if not config.sources:
        raise ValueError("tasks.sources is empty: add an entry with a reasoning-gym dataset or a JSONL path")
    if config.held_out < 0:
        raise ValueError(f"tasks.held_out = {config.held_out}: it must be 0 (none) or more")
    for name in sorted(config.sources):
        check_source(name, config.sources[name])
    sources = {name: read_source(name, config.sources[name], config.seed) for name in sorted(config.sources)}
    distinct = distinct_tasks(sources)
    if config.split:
        return read_split(config.split, [task for tasks in distinct.values() for task in tasks])
    shares = held_out_shares(config, {name: len(tasks) for name, tasks in distinct.items()})
    train: list[Task] = []
    held_out: list[Task] = []
    for name, tasks in distinct.items():
        chosen = set(random.Random(f"{config.seed}/{name}/held out").sample(range(len(tasks)), shares[name]))
        for index, task in enumerate(tasks):
            (held_out if index in chosen else train).append(task)
    return _at_most(train, config), held_out


def _at_most(train: list[Task], config: TasksConfig) -> list[Task]:
    """`config.train` of the tasks, in their order."""
    if not config.train or config.train >= len(train):
        return train
    chosen = random.Random(f"{config.seed}/train").sample(range(len(train)), config.train)
    return [train[index] for index in sorted(chosen)]


def read_split(path: str, tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """(train, held_out) as `rlx edge` chose them; held out are the similar and the new ones.

    Raises:
        ValueError: no such file, none of its kind, or it names tasks that the sources do not have.
    """
    if not pathlib.Path(path).is_file():
        raise ValueError(f"tasks.split = {path!r}: there is no such file; `rlx edge` writes one")
    split = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    parts = ("train", "held_out_similar", "held_out_new")
    if not isinstance(split, dict) or not all(isinstance(split.get(part), list) for part in parts):
        raise ValueError(f"tasks.split = {path!r} is no split: it has no lists {', '.join(parts)}")
    known = {task.id: task for task in tasks}
    unknown = [name for part in parts for name in split[part] if name not in known]
    if unknown:
        raise ValueError(
            f"tasks.split = {path!r} names {len(unknown)} tasks that tasks.sources does not have, such as "
            f"{unknown[0]!r}: it was made with other sources or another tasks.seed"
        )
    train, similar, new = ([known[name] for name in split[part]] for part in parts)
    return train, similar + new


def distinct_tasks(sources: dict[str, list[Task]]) -> dict[str, list[Task]]:
    """The first task of every question, over all sources in their order.

    Raises:
        ValueError: one source asks the same question with two answers in a file; a source has no question of its own.
    """
    seen: dict[str, Task] = {}
    distinct: dict[str, list[Task]] = {name: [] for name in sources}
    for name, tasks in sources.items():
        for task in tasks:
            first = seen.setdefault(normalise_text(task.question), task)
            if first is task:
                distinct[name].append(task)
            elif task.grader != "reasoning_gym" and (first.source, first.question) == (name, task.question):
                _check_same_answer(first, task)
        if not distinct[name]:
            raise ValueError(
                f"tasks.sources.{name} has no distinct questions left: its {len(tasks)} are all asked by sources "
                "before it in alphabetical order; remove it or give it other options"
            )
    return distinct


def _check_same_answer(first: Task, second: Task) -> None:
    if first.answer != second.answer:
        raise ValueError(
            f"tasks {first.id} and {second.id} ask the same question with different answers, {first.answer!r} and "
            f"{second.answer!r}: {first.question!r}"
        )


def held_out_shares(config: TasksConfig, available: dict[str, int]) -> dict[str, int]:
    """How many held-out tasks each source gives, by largest remainders.

    Raises:
        ValueError: a source would have nothing left to train on; names the largest `held_out` that fits.
    """
    weights = {name: config.sources[name].weight for name in available}
    shares = apportion(config.held_out, weights)
    short = [name for name, share in shares.items() if share >= available[name]]
    if not short:
        return shares
    fits = max(
        (n for n in range(config.held_out) if all(s < available[k] for k, s in apportion(n, weights).items())),
        default=0,
    )
    name = short[0]
    raise ValueError(
        f"tasks.held_out = {config.held_out} takes {shares[name]} from tasks.sources.{name}, which has "
        f"{available[name]} distinct questions and must keep one to train on: hold out at most {fits}, or give that "
        "source more questions"
    )


def apportion(total: int, weights: dict[str, float]) -> dict[str, int]:
    """Whole shares that sum to `total`, in proportion to `weights` (largest remainder; ties by order)."""
    whole = math.fsum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    shares = {name: math.floor(share) for name, share in exact.items()}
    by_remainder = sorted(weights, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares
