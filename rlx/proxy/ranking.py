"""Scores of configurations from runs: what `rlx agree` compares, and what the comparison cost."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.proxy import figures
from rlx.proxy.agreement import Agreement, Pair
from rlx.proxy.foreign import Mapped, read_runs
from rlx.proxy.report import Figure, Report, Table, span, whole
from rlx.proxy.runs import RunData, sweep_of, task_rates

# What tells runs of one configuration apart, or one model from another, but is no part of the configuration.
NOT_SETTINGS = (
    "run.",
    "model.",
    "metrics.",
    "tasks.seed",
    "checkpoint.",
    "engine.",
    "grader.workers",
    "simulate.",
    "plan.",
)
PASS_RATE = "eval/pass_rate"
COLUMNS = ("configuration", "seed", "score")


@dataclasses.dataclass(frozen=True)
class Ranked:
    """One study: configuration -> a score per seed, with what its runs cost."""

    scores: dict[str, list[float]]
    runs: int
    seconds: float  # NaN where a run does not say
    tokens: float
    spread: float  # half of the mean interval of a run's own score; NaN where it is no sampled rate
    by_task: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)  # scores of the last evaluation's
    #                                     tasks, a row a seed; {} where the runs do not say


def read_study(
    path: Path, mapping: Mapped | None, metric: str, lower_is_better: bool = False, *, by_task: bool = False
) -> Ranked:
    """The scores of the runs in `path`, or of a CSV table with the columns configuration, seed and score, and where
    they are known seconds, tokens, and low and high, the ends of a sampled score's interval.

    Raises:
      ValueError: two runs of one configuration with one seed, or a run without the metric.
    """
    sign = -1.0 if lower_is_better else 1.0
    if path.suffix == ".csv" and mapping is None:
        return _table(path, sign)
    runs = read_runs(path, mapping)
    labels = labels_of(runs, path)
    scores: dict[str, dict[Any, float]] = {}
    for run, label in zip(runs, labels):
        seeds = scores.setdefault(label, {})
        seed = run.name if run.seed is None else run.seed
        if seed in seeds:
            raise ValueError(f"{path}: two runs of {label!r} with seed {seed}; they would be counted as two seeds")
        seeds[seed] = sign * score_of(run, metric)
    tasks = _by_task(runs, labels) if by_task else {}
    halves = [(e.high - e.low) / 2 for run in runs for e in run.evaluations[-1:]] if metric == PASS_RATE else []
    return Ranked(
        scores={label: [seeds[s] for s in sorted(seeds, key=str)] for label, seeds in scores.items()},
        runs=len(runs),
        seconds=sum(run.seconds for run in runs),
        tokens=sum(run.tokens for run in runs),
        spread=float(np.mean(halves)) if halves else math.nan,
        by_task=tasks,
    )


def _by_task(runs: Sequence[RunData], labels: Sequence[str]) -> dict[str, list[list[float]]]:
    """Raises ValueError for a run that was not evaluated on the tasks of the others."""
    known: list[str] | None = None
    scores: dict[str, list[list[float]]] = {}
    for run, name in zip(runs, labels):
        rates = task_rates(Path(run.source))
        known = list(rates) if known is None else known
        if list(rates) != known:
            raise ValueError(f"{run.source} was evaluated on other tasks than {runs[0].source}")
        scores.setdefault(name, []).append(list(rates.values()))
    return scores


def score_of(run: RunData, metric: str) -> float:
    """The last evaluation's pass rate, or the mean of the last quarter of another metric's curve."""
    if metric == PASS_RATE and run.evaluations:
        return run.evaluations[-1].point.value
    points = run.curves.get(metric, ())
    if not points:
        raise ValueError(f"{run.source} has no {metric}; it has {', '.join(sorted(run.curves)[:12]) or 'no metrics'}")
    return float(np.mean([p.value for p in points[-max(1, len(points) // 4) :]]))


def labels_of(runs: Sequence[RunData], path: Path) -> list[str]:
    """A configuration's name for each run: of the sweep that made it, else the settings that not all runs share."""
    sweep = sweep_of(path)
    if sweep:
        return [sweep[run.name]["label"] for run in runs if run.name in sweep]
    varied = varying(runs)
    if not varied:
        return [run.name if run.seed is None else "the only configuration" for run in runs]
    return [label({key: run.settings.get(key) for key in varied}) for run in runs]


def varying(runs: Sequence[RunData]) -> list[str]:
    """The settings that differ between runs, leaving out what is no part of a configuration."""
    keys = sorted({key for run in runs for key in run.settings if not key.startswith(NOT_SETTINGS)})
    return [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]


def label(settings: Mapping[str, Any]) -> str:
    """`learning_rate=0.001, group_size=8`."""
    return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


def common(target: Ranked, proxy: Ranked) -> tuple[dict[str, list[float]], dict[str, list[float]], list[str]]:
    """The scores of the configurations that both studies have, and the names of the others.

    Raises:
      ValueError: fewer than two in common; names some of each.
    """
    shared = [name for name in target.scores if name in proxy.scores]
    if len(shared) < 2:
        some = [", ".join(list(ranked.scores)[:3]) for ranked in (target, proxy)]
        raise ValueError(
            f"the two studies share {len(shared)} configurations, at least 2 are needed: the target has {some[0]}; "
            f"the proxy has {some[1]}"
        )
    others = [name for name in {**target.scores, **proxy.scores} if name not in shared]
    return {n: target.scores[n] for n in shared}, {n: proxy.scores[n] for n in shared}, others


def report(found: Agreement, target: Ranked, proxy: Ranked, others: Sequence[str]) -> Report:
    """What `rlx agree` writes."""
    cheap = proxy.seconds / target.seconds if target.seconds else math.nan
    cost = (
        f"The target's {target.runs} runs took {span(target.seconds)}, the proxy's {proxy.runs} {span(proxy.seconds)}"
    )
    lines = [str(found), _verdict(found), cost + (f" ({cheap:.0%})" if math.isfinite(cheap) else "")]
    best = [found.configurations[int(np.argmax(means))] for means in (found.target_means, found.proxy_means)]
    lines.append(
        f"Best on the target: {best[0]}; on the proxy: {best[1]}. In {found.top1_probability:.0%} of the resamples of "
        "the seeds both have the same best"
    )
    if others:
        lines.append(f"Left out, as only one study has it: {', '.join(others)}")
    costs = {
        name: {"runs": of.runs, "seconds": of.seconds, "tokens": of.tokens, "score_half_interval": of.spread}
        for name, of in (("target", target), ("proxy", proxy))
    }
    return Report(
        title="Does the proxy rank configurations as the target does?",
        lines=lines,
        tables=[_scores_table(found, target, proxy), _pairs_table(found)],
        figures=[Figure("agree", "mean scores of every configuration", figures.png(figures.agreement(found)))],
        record={**found.to_dict(), "cost": costs, "left_out": list(others)},
    )


def _verdict(found: Agreement) -> str:
    low, high = found.kendall_interval
    if low > 0:
        return "The proxy's ranking agrees with the target's better than chance would"
    if high < 0:
        return "The proxy's ranking is against the target's"
    return "Not decided: the interval of tau holds 0; more seeds of the open pairs would say more"


def _scores_table(found: Agreement, target: Ranked, proxy: Ranked) -> Table:
    order = np.argsort(-np.array(found.target_means), kind="stable")
    rows = []
    for i in order:
        name = found.configurations[i]
        cells = [
            f"{m[i]:.4g} ({', '.join(f'{v:.4g}' for v in of.scores[name])})" for m, of in _both(found, target, proxy)
        ]
        rows.append([name, *cells])
    title = "Mean scores (seeds)"
    if math.isfinite(target.spread + proxy.spread):
        title += f"; each a sampled rate, on average ± {target.spread:.3f} (target) and ± {proxy.spread:.3f} (proxy)"
    return Table(title, ["configuration", "target", "proxy"], rows)


def _both(found: Agreement, target: Ranked, proxy: Ranked) -> list[tuple[tuple[float, ...], Ranked]]:
    return [(found.target_means, target), (found.proxy_means, proxy)]


def _pairs_table(found: Agreement) -> Table:
    rows = [[p.first, p.second, *_differences(p), p.verdict, *_seeds(p)] for p in found.pairs]
    title = f"Pairs: differences with their {found.confidence:.0%} intervals"
    header = ["first", "second", "target", "proxy", "verdict", "target's seeds to decide", "proxy's"]
    return Table(title, header, rows)


def _differences(pair: Pair) -> list[str]:
    both = ((pair.target_difference, pair.target_interval), (pair.proxy_difference, pair.proxy_interval))
    return [f"{middle:+.3g} [{low:+.3g}, {high:+.3g}]" for middle, (low, high) in both]


def _seeds(pair: Pair) -> list[str]:
    needed = (pair.target_seeds_to_decide, pair.proxy_seeds_to_decide)
    return ["more than 1000" if n is None else whole(n) for n in needed]


def _table(path: Path, sign: float) -> Ranked:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path}: a table of scores has the columns {', '.join(COLUMNS)}; {missing[0]!r} is missing")
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["configuration"], []).append(sign * float(row["score"]))
    seconds, tokens = (sum(float(row.get(name) or math.nan) for row in rows) for name in ("seconds", "tokens"))
    halves = [(float(row["high"]) - float(row["low"])) / 2 for row in rows if row.get("low") and row.get("high")]
    return Ranked(scores, len(rows), seconds, tokens, float(np.mean(halves)) if halves else math.nan)
