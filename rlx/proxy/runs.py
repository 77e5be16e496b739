"""Runs as comparisons see them, whoever made them: curves over updates, seconds and tokens, and evaluations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlx.config.identity import flat
from rlx.metrics.jsonl import read_json, read_jsonl
from rlx.metrics.rollout import PASS
from rlx.metrics.statistics import wilson_interval
from rlx.metrics.view import Record, RunView, number, read_run, read_samples, runs_below, setting

Axis = Literal["updates", "seconds", "tokens"]
AXES: tuple[Axis, ...] = ("updates", "seconds", "tokens")
WATCH = "watch"  # the folder of a run in which `rlx evaluate --watch` writes
SWEEP = "sweep.json"
KINDS_OF_MODEL = ("sft", "model", "adapter", "merged", "checkpoint")
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Point:
    """A metric's value after `updates` updates, `seconds` of training without warm-up, and `tokens` generated.

    NaN where a run does not say.
    """

    updates: float
    seconds: float
    tokens: float
    value: float

    def at(self, axis: Axis) -> float:
        return {"updates": self.updates, "seconds": self.seconds, "tokens": self.tokens}[axis]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A sampled evaluation; its rate means nothing without the interval, which is NaN where attempts are unknown."""

    point: Point  # its value is the pass rate
    low: float
    high: float
    attempts: float
    tasks: float

    @property
    def passes(self) -> int:
        return round(self.point.value * self.attempts)


@dataclasses.dataclass(frozen=True)
class RunData:
    name: str
    source: str  # where it was read from
    model: str  # trends are judged within one, never between two
    settings: Mapping[str, Any]  # dotted keys; {} where nothing is known
    seed: int | None
    curves: Mapping[str, tuple[Point, ...]]  # by rlx's metric names
    evaluations: tuple[Evaluation, ...]  # in the order of updates
    seconds: float  # wall time of the whole run, NaN where unknown
    state: str  # complete | running | stopped | foreign

    @property
    def updates(self) -> int:
        """The last update of any curve."""
        ends = [points[-1].updates for points in self.curves.values() if points]
        return int(max([*ends, *(e.point.updates for e in self.evaluations)], default=0))

    @property
    def tokens(self) -> float:
        return max((p.tokens for points in self.curves.values() for p in points if math.isfinite(p.tokens)), default=0)


def read_rlx(path: Path) -> RunData:
    """A run of `rlx train`, with what `rlx evaluate --watch` has added. Raises what `read_run` does."""
    view = read_run(path)
    clock = _Clock(view.updates, int(setting(view.config, "metrics.skip_updates") or 0))
    names = {name for record in view.updates for name in record if "/" in name}
    curves = {name: _curve(view.updates, name, clock) for name in sorted(names)}
    # Of one update the run's own evaluation counts, and of its own the last: "before", after a cold start, not "base".
    recorded = [*_watched(path), *view.evaluations.values()]
    found = {int(record["update"]): _evaluation(record, clock) for record in recorded}
    settings = flat(view.config)
    return RunData(
        name=path.resolve().name,
        source=str(path),
        model=model_name(str(setting(view.config, "model.path"))),
        settings=settings,
        seed=settings.get("run.seed"),
        curves={name: points for name, points in curves.items() if points},
        evaluations=tuple(found[update] for update in sorted(found)),
        seconds=_seconds(view),
        state=view.state,
    )


def model_name(path: str) -> str:
    """The directory's name, with that above it where it says only what kind of model it is."""
    parts = Path(path).parts[-2:]
    return "/".join(parts) if parts[-1:] and parts[-1] in KINDS_OF_MODEL else "".join(parts[-1:])


def task_rates(path: Path) -> dict[str, float]:
    """Task -> share of its attempts that passed, in the last evaluation that the run itself made.

    Raises:
      ValueError: it has made none.
    """
    rates: dict[str, dict[str, list[bool]]] = {}
    for record in read_samples(path):
        if record["phase"] == "eval":
            rates.setdefault(record["label"], {}).setdefault(record["task"], []).append(
                number(record["reward"]) >= PASS
            )
    if not rates:
        raise ValueError(f"{path} has no evaluation in its samples.jsonl, so nothing is known of single tasks")
    last = list(rates)[-1]
    return {task: sum(attempts) / len(attempts) for task, attempts in sorted(rates[last].items())}


def rlx_runs(path: Path) -> list[Path]:
    """A run's directory, or the runs of a directory of runs."""
    return runs_below(path) or [path]


def sweep_of(path: Path) -> dict[str, Record]:
    """run name -> {"settings", "seed"} of a directory that `rlx sweep` made; {} of another one."""
    file = path / SWEEP
    return {row["run"]: row for row in read_json(file)["runs"]} if file.is_file() else {}


def evaluation_of(point: Point, attempts: float, tasks: float, confidence: float = CONFIDENCE) -> Evaluation:
    """With Wilson's interval of the rate `point.value` over `attempts`; NaN ends where attempts are unknown."""
    low = high = math.nan
    if math.isfinite(attempts) and attempts >= 1 and 0 <= point.value <= 1:
        low, high = wilson_interval(round(point.value * attempts), round(attempts), confidence)
    return Evaluation(point, low, high, attempts, tasks)


class _Clock:
    """Seconds and tokens at the end of each update; the first updates, which hold compilation, count no time."""

    def __init__(self, records: Sequence[Record], skipped: int) -> None:
        self.seconds, self.tokens = {0: 0.0}, {0: 0.0}
        elapsed = 0.0
        for at, record in enumerate(records):
            spent = number(record.get("time/total_seconds")) - _or_zero(record.get("time/eval_seconds"))
            elapsed += spent if at >= skipped else 0.0
            self.seconds[record["update"]] = elapsed
            self.tokens[record["update"]] = number(record.get("ledger/tokens_generated"))

    def point(self, update: int, value: float) -> Point:
        return Point(update, self.seconds.get(update, math.nan), self.tokens.get(update, math.nan), value)


def _or_zero(value: Any) -> float:
    seconds = number(value)
    return seconds if math.isfinite(seconds) else 0.0


def _curve(records: Sequence[Record], name: str, clock: _Clock) -> tuple[Point, ...]:
    values = ((r["update"], number(r.get(name))) for r in records)
    return tuple(clock.point(update, value) for update, value in values if math.isfinite(value))


def _evaluation(record: Record, clock: _Clock) -> Evaluation:
    value = {name: number(record.get(f"eval/{name}")) for name in ("pass_rate", "attempts", "tasks")}
    low, high = (number(record.get(f"eval/pass_rate_{end}")) for end in ("low", "high"))
    point = clock.point(int(record["update"]), value["pass_rate"])
    return Evaluation(point, low, high, value["attempts"], value["tasks"])


def _watched(path: Path) -> list[Record]:
    file = path / WATCH / "evaluations.jsonl"
    return read_jsonl(file)[0] if file.is_file() else []


def _seconds(view: RunView) -> float:
    if view.summary is not None:
        return number(view.summary.get("seconds"))
    return sum(_or_zero(record.get("time/total_seconds")) for record in view.updates)
