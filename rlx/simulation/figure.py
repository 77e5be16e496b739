"""Pictures of simulated runs: one run's timeline and distributions, or a sweep as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure as mpl
import numpy as np
from matplotlib.backend_bases import FigureCanvasBase

from rlx.config.errors import ConfigError
from rlx.simulation.result import Result

PHASES = {"waits": "#d0d0d0", "trains": "#3b6fb6", "publishes": "#e08a2c"}
BARS = 40  # updates that a timeline shows


def check(path: Path) -> None:
    """Raises ConfigError for a format that matplotlib does not write, OSError where no file can be."""
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"--png={path}: its ending says the format; use one of {', '.join(sorted(formats))}")
    path.parent.mkdir(parents=True, exist_ok=True)


def write(path: Path, results: Sequence[tuple[Mapping[str, str], Result]]) -> None:
    """A picture of the one result, or of all. `check` the path first."""
    draw = one_run(results[0][1]) if len(results) == 1 else sweep(results)
    draw.savefig(path, dpi=150)


def one_run(result: Result) -> mpl.Figure:
    figure = mpl.Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplot_mosaic("tttt;llll;abcd", height_ratios=[0.7, 1.2, 1.3])
    _phases(axes["t"], result)
    _levels(axes["l"], result)
    _bars(axes["a"], result.ages, "age of trained tokens, updates", "share")
    _histogram(axes["b"], [(u.ended - u.began) / 60 for u in _counted(result)], "an update, min")
    _histogram(axes["c"], [u.trained_tokens / 1000 for u in _counted(result)], "trained tokens of an update, thousands")
    _bins(axes["d"], result)
    figure.suptitle(
        f"{result.config.run.name}: {result.update_minutes:.1f} min an update, "
        f"trainer waits {result.trainer_wait_share:.0%}, engines {result.engine_occupancy:.0%} full, "
        f"age {result.age_mean:.1f}"
    )
    return figure


def sweep(results: Sequence[tuple[Mapping[str, str], Result]]) -> mpl.Figure:
    """The first setting on the horizontal axis, a curve for each combination of the others."""
    figure = mpl.Figure(figsize=(11, 3.4), layout="constrained")
    panels = {
        "an update, min": lambda r: r.update_minutes,
        "trainer waits, share": lambda r: r.trainer_wait_share,
        "age of trained tokens, updates": lambda r: r.age_mean,
        "discarded as stale, share": lambda r: r.stale_share,
    }
    first = next(iter(results[0][0]))
    ticks = list(dict.fromkeys(setting[first] for setting, _ in results))
    curves: dict[str, list[tuple[int, Result]]] = {}
    for setting, result in results:
        label = ", ".join(f"{key.rpartition('.')[2]} {v}" for key, v in setting.items() if key != first)
        curves.setdefault(label, []).append((ticks.index(setting[first]), result))
    axes = figure.subplots(1, len(panels))
    for axis, (name, value) in zip(axes, panels.items()):
        for label, points in curves.items():
            axis.plot([x for x, _ in points], [value(r) for _, r in points], marker="o", label=label)
        axis.set(title=name, xlabel=first.rpartition(".")[2], ylim=(0, None))
        axis.set_xticks(range(len(ticks)), ticks)
        axis.grid(alpha=0.3)
    if any(curves):
        axes[0].legend()
    return figure


def _counted(result: Result) -> Sequence[Any]:
    return result.updates[result.config.metrics.skip_updates :]


def _phases(axis: Any, result: Result) -> None:
    shown = result.updates[:BARS]
    spans = {
        "waits": [(u.began, u.taken - u.began) for u in shown],
        "trains": [(u.taken, u.trained - u.taken) for u in shown],
        "publishes": [(u.trained, u.published - u.trained) for u in shown],
    }
    for name, parts in spans.items():
        hours = [(start / 3600, seconds / 3600) for start, seconds in parts]
        axis.broken_barh(hours, (0, 1), facecolors=PHASES[name], label=name)
    axis.set(yticks=[], xlim=(0, shown[-1].ended / 3600), title="trainer")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(PHASES), frameon=False)


def _levels(axis: Any, result: Result) -> None:
    times = np.array(result.timeline.times) / 3600
    engines, sessions = result.timeline.values["engines"], result.timeline.values["sessions"]
    axis.plot(times, engines, color="#2a8a57", lw=0.8, label="engines' slots in use, share")
    axis.set(ylim=(0, 1.05), xlim=(0, result.updates[:BARS][-1].ended / 3600), xlabel="hours", ylabel="share")
    other = axis.twinx()
    other.plot(times, sessions, color="#8a3a8a", lw=0.8, label="open sessions")
    other.plot(times, result.timeline.values["groups"], color="#b63b3b", lw=0.8, label="groups that wait")
    other.set(ylim=(0, None), ylabel="count")
    lines = [*axis.get_lines(), *other.get_lines()]
    axis.legend(
        lines, [line.get_label() for line in lines], loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False
    )


def _bars(axis: Any, shares: Mapping[int, float], label: str, unit: str) -> None:
    axis.bar(list(shares), list(shares.values()), color="#3b6fb6")
    axis.set(xlabel=label, ylabel=unit, xticks=list(shares))


def _histogram(axis: Any, values: Sequence[float], label: str) -> None:
    low, high = min(values), max(values)
    if high - low <= 1e-6 * abs(high):  # all the same, up to rounding
        low, high = low - 0.5, high + 0.5
    axis.hist(values, bins=min(20, max(5, len(values) // 2)), range=(low, high), color="#3b6fb6")
    axis.set(xlabel=label, ylabel="updates")


def _bins(axis: Any, result: Result) -> None:
    held = {name: n for name, n in result.tokens.items() if n}
    total = sum(held.values())
    axis.barh(list(held), [n / total for n in held.values()], color="#3b6fb6")
    axis.invert_yaxis()
    axis.set(xlabel="share of the generated tokens", xlim=(0, 1))
