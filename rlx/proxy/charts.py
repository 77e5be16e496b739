"""A comparison as a report: what report.html draws, what its tables say, and the PNG beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlx.proxy import figures
from rlx.proxy.compare import Matched, Reading, matched_pairs, read
from rlx.proxy.panels import EVALUATION, Panel, points_of, shown_panels
from rlx.proxy.report import Figure, Report, Table, rate, short, span, whole
from rlx.proxy.runs import AXES, Axis, RunData

MOST_POINTS = 400  # of a line on the page
HTML_DASHES = {"-": "", "--": "6 4", ":": "2 3", "-.": "8 3 2 3"}


def comparison(runs: Sequence[RunData], axis: Axis = "updates") -> Report:
    """Everything `rlx compare` says of 1 to 60 runs; `axis` is the PNG's, the page lets the reader choose."""
    readings = [read(run) for run in runs]
    pairs = matched_pairs(runs)
    picture = Figure("compare", "every run's metrics", figures.png(figures.comparison(runs, axis)), inline=False)
    return Report(
        title=f"{len(runs)} runs of {len({run.model for run in runs})} models",
        lines=[sentence(reading) for reading in readings] + [said(p) for p in pairs if p.verdict != "not decided"],
        tables=[_runs_table(runs), _readings_table(readings), *([_pairs_table(pairs)] if pairs else [])],
        figures=[picture],
        record={
            "runs": [_about(run) for run in runs],
            "readings": [dataclasses.asdict(reading) for reading in readings],
            "comparisons": [dataclasses.asdict(pair) for pair in pairs],
        },
        charts=_charts(runs),
    )


REWARD_SAID = {"no trend": "shows no trend", "too few points": "has too few updates for a trend"}
VALIDATION_SAID = {"rises": "validation rises", "falls": "validation falls", "no evaluations": "no validation"}
PEAK_SAID = {"yes": ", above the last one", "not decided": ", but not decidedly above the last one"}


def sentence(reading: Reading) -> str:
    """What a person wants to know of a run, in one line."""
    learns = {"yes": "learns", "no": "does not learn"}.get(reading.reproduces_learning, "learning is not decided")
    parts = [learns]
    if reading.reward is not None:
        direction = reading.reward.direction
        ends = f"{short(reading.reward.first)} to {short(reading.reward.last)}"
        parts.append(f"training reward {REWARD_SAID.get(direction, direction)} ({ends})")
    change = reading.validation_change
    shown = f" {change[0]:+.3f} [{change[1]:+.3f}, {change[2]:+.3f}]" if change else ""
    parts.append(VALIDATION_SAID.get(reading.validation, f"validation {reading.validation}") + shown)
    if reading.peak_update is not None and reading.peak_above_last in PEAK_SAID:
        parts.append(f"its peak was at update {reading.peak_update}{PEAK_SAID[reading.peak_above_last]}")
    elif reading.peak_update is not None:
        parts.append("its last evaluation is the best")
    grown = [name for name, direction in reading.growing.items() if direction == "rises"]
    if grown:
        parts.append(f"still growing in the second half: {', '.join(grown)}")
    return f"{reading.run} ({reading.model}) {'; '.join(parts)}"


def said(pair: Matched) -> str:
    cost = f"{whole(pair.cost)} {'generated tokens' if pair.axis == 'tokens' else 'seconds'}"
    middle, low, high = pair.difference
    return f"At {cost} {pair.verdict}: {pair.first} less {pair.second} is {middle:+.3f} [{low:+.3f}, {high:+.3f}]"


def _charts(runs: Sequence[RunData]) -> dict[str, Any]:
    looks = figures.styles(runs)
    return {
        "axes": list(AXES),
        "runs": [
            {"name": run.name, "model": run.model, "colour": colour, "dash": HTML_DASHES[dash]}
            for run, (colour, dash) in zip(runs, looks)
        ],
        "panels": [
            {
                "title": panel.title,
                "unit": panel.unit,
                "sampled": panel == EVALUATION,
                "points": [_drawn(run, panel) for run in runs],
            }
            for panel in shown_panels(runs)
        ],
    }


def _drawn(run: RunData, panel: Panel) -> list[list[float]]:
    """[updates, seconds, tokens, value], and for evaluations both ends of the interval."""
    if panel == EVALUATION:
        return [[*dataclasses.astuple(e.point), e.low, e.high] for e in run.evaluations]
    points = points_of(run, panel)
    every = max(1, len(points) // MOST_POINTS)
    return [list(dataclasses.astuple(point)) for point in [*points[:-1:every], *points[-1:]]]


def _about(run: RunData) -> dict[str, Any]:
    last = run.evaluations[-1] if run.evaluations else None
    return {
        "name": run.name,
        "source": run.source,
        "model": run.model,
        "state": run.state,
        "seed": run.seed,
        "updates": run.updates,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "evaluations": [dataclasses.asdict(e) for e in run.evaluations],
        "pass_rate": None if last is None else last.point.value,
        "pass_rate_interval": None if last is None else [last.low, last.high],
    }


def _runs_table(runs: Sequence[RunData]) -> Table:
    rows = []
    for run in runs:
        ends = [rate(e.point.value, e.low, e.high) for e in (*run.evaluations[:1], *run.evaluations[-1:])]
        first, last = ends if len(run.evaluations) > 1 else (*ends[:1], "–") if ends else ("–", "–")
        cells = [run.name, run.model, run.state, str(run.updates), whole(run.tokens), span(run.seconds), first, last]
        rows.append(cells)
    header = ["run", "model", "state", "updates", "tokens", "time", "first evaluation", "last evaluation"]
    return Table("Runs", header, rows)


def _readings_table(readings: Sequence[Reading]) -> Table:
    rows = []
    for r in readings:
        change = r.validation_change
        shown = "–" if change is None else f"{change[0]:+.3f} [{change[1]:+.3f}, {change[2]:+.3f}]"
        peak = "–" if r.peak_update is None else f"update {r.peak_update}, above the last: {r.peak_above_last}"
        growing = "; ".join(f"{name.partition('/')[2]}: {direction}" for name, direction in r.growing.items()) or "–"
        reward = "–" if r.reward is None else r.reward.direction
        rows.append([r.run, reward, f"{r.validation} {shown}", peak, growing, r.reproduces_learning])
    header = ["run", "training reward", "validation, last less first", "peak", "second half", "reproduces learning"]
    return Table("What each run shows", header, rows)


def _pairs_table(pairs: Sequence[Matched]) -> Table:
    rows = []
    for p in pairs:
        shown = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*p.difference)
        needed = "more than a million" if p.attempts_to_decide is None else whole(p.attempts_to_decide)
        rows.append([p.first, p.second, f"{whole(p.cost)} {p.axis}", shown, p.verdict, needed])
    header = ["first", "second", "at", "pass rate, first less second", "verdict", "attempts of each to decide"]
    return Table("At matched cost", header, rows)
