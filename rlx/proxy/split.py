"""What `rlx edge` found: each task's evidence, and edge tasks split into those to train on and those to evaluate on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.metrics.statistics import no_signal_probability, wilson_interval
from rlx.proxy import figures
from rlx.proxy.edge import EdgeOptions, Tally, Verdicts
from rlx.proxy.report import Figure, Report, Table, rate
from rlx.proxy.runs import CONFIDENCE

SHOWN_UNGRADED = 6  # ids in the report's line; its record has all


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One task, by the base policy's attempts."""

    task: str  # its id
    source: str
    attempts: int
    passes: int
    pass_rate: float
    low: float  # Wilson's interval
    high: float
    no_signal: float  # probability that a group of the run's size has equal rewards, at this pass rate
    limited: float  # share of the attempts that a limit ended
    edge_probability: float  # posterior probability that the pass rate is in the band
    is_edge: bool


@dataclasses.dataclass(frozen=True)
class SplitOptions:
    """How many edge tasks go where. The sources of `new` tasks are kept out of training altogether."""

    train: int = 0  # at most; 0 = all that are left
    held_out_similar: int = 0  # edge tasks of sources that are trained on
    held_out_new: int = 0  # edge tasks of sources that are not, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.train, self.held_out_similar, self.held_out_new) < 0:
            raise ValueError(f"a number of tasks is 0 or more, got {self}")


@dataclasses.dataclass(frozen=True)
class Split:
    """Task ids. `rlx train` reads it as tasks.split."""

    train: tuple[str, ...]
    held_out_similar: tuple[str, ...]
    held_out_new: tuple[str, ...]

    def to_dict(self) -> dict[str, list[str]]:
        return {name: list(ids) for name, ids in dataclasses.asdict(self).items()}


def evidence(
    tasks: Sequence[tuple[str, str]], tally: Tally, limited: np.ndarray, verdicts: Verdicts, group_size: int
) -> list[Evidence]:
    """Of (id, source) of each task with a verdict; `limited` counts attempts that a limit ended."""
    rows = []
    for i, (task, source) in enumerate(tasks):
        attempts, passes = int(tally.attempts[i]), int(tally.passes[i])
        if not attempts:
            continue
        low, high = wilson_interval(passes, attempts, CONFIDENCE)
        share = passes / attempts
        edge = bool(verdicts.is_edge[i])
        chance = float(verdicts.in_band[i])
        no_signal = no_signal_probability(share, group_size)
        cut = float(limited[i]) / attempts
        rows.append(Evidence(task, source, attempts, passes, share, low, high, no_signal, cut, chance, edge))
    return rows


def without_verdict(tasks: Sequence[tuple[str, str]], tally: Tally) -> list[str]:
    """Ids of the tasks that were given up: no attempt at them could be graded."""
    return [task for (task, _), attempts in zip(tasks, tally.attempts) if not attempts]


def split(rows: Sequence[Evidence], options: SplitOptions) -> Split:
    """Edge tasks to train on, those whose groups have most spread first, and two held-out sets.

    Raises:
      ValueError: too few edge tasks, or only one source where new ones are asked for; says how many there are.
    """
    edges = [row for row in rows if row.is_edge]
    if not edges:
        raise ValueError(_no_edge(rows))
    rng = random.Random(f"{options.seed}/edge split")
    new_sources = _new_sources(edges, options.held_out_new, rng)
    new = [row.task for row in edges if row.source in new_sources][: options.held_out_new]
    known = [row for row in edges if row.source not in new_sources]
    if options.held_out_similar >= len(known):
        raise ValueError(
            f"held_out_similar = {options.held_out_similar}: there are {len(known)} edge tasks of other sources than "
            "the new ones, and one at least must be left to train on"
        )
    similar = {row.task for row in rng.sample(known, options.held_out_similar)}
    left = sorted((row for row in known if row.task not in similar), key=lambda row: row.no_signal)
    train = [row.task for row in left[: options.train or None]]
    return Split(tuple(train), tuple(row.task for row in known if row.task in similar), tuple(new))


def _no_edge(rows: Sequence[Evidence]) -> str:
    never, always = sum(not row.passes for row in rows), sum(row.passes == row.attempts for row in rows)
    return (
        f"no task's pass rate is in the band: of {len(rows)} tasks {never} never passed, {always} always, "
        f"{len(rows) - never - always} now and then. Take easier tasks where most never pass and harder ones where "
        "most always do, another model (or the run's newest with --checkpoint), or a wider band (--low, --high)"
    )


def _new_sources(edges: Sequence[Evidence], wanted: int, rng: random.Random) -> set[str]:
    """Sources, drawn at random, that have `wanted` edge tasks together; one source is always left."""
    sources = sorted({row.source for row in edges})
    if wanted and len(sources) < 2:
        raise ValueError(f"held_out_new = {wanted}: edge tasks are of {len(sources)} source(s), at least 2 are needed")
    rng.shuffle(sources)
    chosen: set[str] = set()
    for source in sources[:-1]:
        if sum(row.source in chosen for row in edges) >= wanted:
            break
        chosen.add(source)
    return chosen


def report(
    rows: Sequence[Evidence],
    verdicts: Verdicts,
    chosen: Split | None,
    options: EdgeOptions,
    about: Any,
    ungraded: Sequence[str] = (),
) -> Report:
    """What `rlx edge` writes. `chosen`: None where the split that was asked for is impossible, and `rlx train` refuses
    the record; `about`: model, group size and what else the evidence belongs to; `ungraded`: tasks that nothing is
    known of."""
    attempts = sum(row.attempts for row in rows)
    found = sum(row.is_edge for row in rows)
    low, high = wilson_interval(found, len(rows), CONFIDENCE)
    lines = [
        f"{rate(found / len(rows), low, high)} of {len(rows)} tasks are edge tasks: pass rate within "
        f"[{options.low:g}, {options.high:g}]",
        f"{attempts} attempts, {attempts / len(rows):.1f} a task ({min(r.attempts for r in rows)} to "
        f"{max(r.attempts for r in rows)}); expected share misclassified {verdicts.expected_error:.3f}, asked for "
        f"{options.error:g}" + ("" if verdicts.expected_error <= options.error else ": not reached"),
        _said(chosen),
    ]
    if ungraded:
        shown = ", ".join(ungraded[:SHOWN_UNGRADED]) + (", ..." if len(ungraded) > SHOWN_UNGRADED else "")
        lines.append(f"left out, because no attempt got a verdict: {len(ungraded)} tasks ({shown}); mend their graders")
    rates, ends = np.array([r.pass_rate for r in rows]), np.array([[r.low, r.high] for r in rows])
    names, is_edge = [r.task for r in rows], np.array([r.is_edge for r in rows])
    picture = figures.png(figures.edge(names, rates, ends, is_edge, (options.low, options.high)))
    return Report(
        title="Edge tasks",
        lines=lines,
        tables=[_by_source(rows), _table(rows, chosen)],
        figures=[Figure("edge", "pass rates with their intervals; the band is green", picture)],
        record={
            **({} if chosen is None else chosen.to_dict()),
            "expected_error": verdicts.expected_error,
            "prior": list(verdicts.prior),
            "options": dataclasses.asdict(options),
            "about": about,
            "without_verdict": list(ungraded),
            "evidence": [dataclasses.asdict(row) for row in rows],
        },
    )


def _said(chosen: Split | None) -> str:
    if chosen is None:
        return "no split was made"
    return (
        f"split: {len(chosen.train)} to train on, held out {len(chosen.held_out_similar)} of the same sources and "
        f"{len(chosen.held_out_new)} of new ones"
    )


def _by_source(rows: Sequence[Evidence]) -> Table:
    grouped: dict[str, list[Evidence]] = {}
    for row in rows:
        grouped.setdefault(row.source, []).append(row)
    cells = [[name, *_summary(found)] for name, found in grouped.items()]
    return Table("By source", ["source", "tasks", "edge tasks", "pass rate of attempts", "ended by a limit"], cells)


def _summary(rows: Sequence[Evidence]) -> list[str]:
    passes, attempts = sum(r.passes for r in rows), sum(r.attempts for r in rows)
    limited = sum(r.limited * r.attempts for r in rows) / attempts
    shown = rate(passes / attempts, *wilson_interval(passes, attempts, CONFIDENCE))
    return [str(len(rows)), str(sum(r.is_edge for r in rows)), shown, f"{limited:.1%}"]


def _table(rows: Sequence[Evidence], chosen: Split | None) -> Table:
    parts = {} if chosen is None else chosen.to_dict()
    places: Mapping[str, str] = {task: name for name, ids in parts.items() for task in ids}
    cells = [
        [
            row.task,
            f"{row.passes} of {row.attempts}",
            rate(row.pass_rate, row.low, row.high),
            f"{row.edge_probability:.2f}",
            f"{row.no_signal:.2f}",
            f"{row.limited:.0%}",
            places.get(row.task, "–").replace("_", " "),
        ]
        for row in sorted(rows, key=lambda r: r.no_signal)
    ]
    header = ["task", "passes", "pass rate", "P(edge)", "P(no signal)", "ended by a limit", "goes to"]
    return Table("Tasks, those with most signal first", header, cells)
