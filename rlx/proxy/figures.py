"""The figures of comparisons, edges and rankings, as PNG."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure as mpl
import numpy as np
from adjustText import adjust_text
from matplotlib.lines import Line2D

from rlx.metrics.jsonl import write_bytes
from rlx.proxy.agreement import Agreement
from rlx.proxy.panels import EVALUATION, points_of, shown_panels
from rlx.proxy.runs import Axis, RunData

# Of equal lightness and told apart by colour-blind readers (Okabe & Ito), then again with another dash.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5cc4", "#666666")
DASHES = ("-", "--", ":", "-.")
LABELS: dict[Axis, str] = {
    "updates": "updates",
    "seconds": "seconds of training, without warm-up and evaluations",
    "tokens": "generated tokens",
}
MOST_NAMED = 16  # runs in a legend


def styles(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """(colour, dash) of each run: every run its own colour where they are few, else every model."""
    if len(runs) <= len(COLOURS):
        return [(COLOURS[i], "-") for i in range(len(runs))]
    models = list(dict.fromkeys(run.model for run in runs))
    looks = list(itertools.product(DASHES, COLOURS))
    return [(looks[models.index(r.model) % len(looks)][1], looks[models.index(r.model) % len(looks)][0]) for r in runs]


def comparison(runs: Sequence[RunData], axis: Axis) -> mpl.Figure:
    """A panel a metric, a line a run."""
    panels = shown_panels(runs)
    columns = min(3, max(1, len(panels)))
    rows = math.ceil(len(panels) / columns)
    figure = mpl.Figure(figsize=(4.6 * columns, 2.7 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for spare in grid[len(panels) :]:
        spare.set_axis_off()
    for panel, plot in zip(panels, grid):
        for run, (colour, dash) in zip(runs, styles(runs)):
            points = [p for p in points_of(run, panel) if math.isfinite(p.at(axis))]
            look = {"color": colour, "ls": dash, "lw": 1.3, "alpha": 0.9 if len(runs) <= len(COLOURS) else 0.45}
            plot.plot([p.at(axis) for p in points], [p.value for p in points], **look)
            if panel == EVALUATION:
                _intervals(plot, run, axis, colour)
        plot.set_title(panel.title, fontsize=10)
        plot.set(xlabel=LABELS[axis], ylabel=panel.unit)
        plot.grid(alpha=0.25)
    _legend(figure, runs)
    return figure


def _intervals(plot: Any, run: RunData, axis: Axis, colour: str) -> None:
    known = [e for e in run.evaluations if math.isfinite(e.low) and math.isfinite(e.point.at(axis))]
    x, value = ([e.point.at(axis) for e in known], np.array([e.point.value for e in known]))
    low, high = np.array([e.low for e in known]), np.array([e.high for e in known])
    ends = np.maximum([value - low, high - value], 0)
    plot.errorbar(x, value, ends, fmt="o", ms=3, color=colour, elinewidth=0.8, alpha=0.7)


def _legend(figure: mpl.Figure, runs: Sequence[RunData]) -> None:
    looks = styles(runs)
    several = len(runs) > len(COLOURS)
    names = [run.model if several else f"{run.name} ({run.model})" for run in runs]
    named = dict(zip(names, looks))
    lines = [Line2D([], [], color=colour, ls=dash) for colour, dash in list(named.values())[:MOST_NAMED]]
    figure.legend(lines, list(named)[:MOST_NAMED], loc="outside upper center", ncols=3, frameon=False, fontsize=9)


def agreement(found: Agreement) -> mpl.Figure:
    """Every configuration's mean score on the target against that on the proxy."""
    figure = mpl.Figure(figsize=(7.5, 5.2), layout="constrained")
    plot = figure.subplots()
    plot.scatter(found.proxy_means, found.target_means, color=COLOURS[0], zorder=3)
    labels = [
        plot.text(x, y, name, fontsize=8)
        for name, x, y in zip(found.configurations, found.proxy_means, found.target_means)
    ]
    low, high = found.kendall_interval
    share = 1 - len(found.undecided_pairs) / len(found.pairs)
    plot.set(xlabel="mean score on the proxy", ylabel="mean score on the target")
    plot.set_title(
        f"Kendall tau-b {found.kendall_tau:.2f}, {found.confidence:.0%} interval [{low:.2f}, {high:.2f}]; "
        f"{share:.0%} of the pairs decided",
        fontsize=10,
    )
    plot.grid(alpha=0.25)
    plot.margins(0.15)
    figure.draw_without_rendering()  # what is moved apart must know its size
    adjust_text(labels, ax=plot, arrowprops={"arrowstyle": "-", "color": "0.6"}, expand=(1.15, 1.4))
    return figure


def edge(names: Sequence[str], rates: np.ndarray, intervals: np.ndarray, is_edge: np.ndarray, band: Any) -> mpl.Figure:
    """Every task's pass rate with its interval, tasks in the order of their rates."""
    order = np.lexsort((intervals[:, 1], rates))
    figure = mpl.Figure(figsize=(9, 4.2), layout="constrained")
    plot = figure.subplots()
    plot.axhspan(*band, color=COLOURS[2], alpha=0.1, lw=0)
    for label, chosen, colour in (("edge tasks", True, COLOURS[2]), ("other tasks", False, COLOURS[7])):
        at = np.flatnonzero(is_edge[order] == chosen)
        rate, ends = rates[order][at], intervals[order][at]
        spread = np.maximum([rate - ends[:, 0], ends[:, 1] - rate], 0)
        plot.errorbar(at, rate, spread, fmt="o", ms=3.5, lw=0.8, color=colour, label=f"{label}: {len(at)}")
    plot.set(xlabel=f"{len(names)} tasks by pass rate", ylabel="pass rate, with its interval", ylim=(-0.03, 1.03))
    plot.legend(loc="upper left", frameon=False)
    return figure


def png(figure: mpl.Figure, dpi: int = 130) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()


def write(figure: mpl.Figure, path: Path) -> None:
    write_bytes(path, png(figure))
