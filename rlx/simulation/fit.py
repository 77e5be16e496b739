"""`config.simulate` from the records of a run: distributions of its sessions, speeds of its engines and trainer.

Reads what `rlx.rollout.timing` writes. Engine speeds are in `rlx.simulation.fit_engines`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize

from rlx.config.errors import ConfigError
from rlx.config.parse import parse
from rlx.config.schema import Config
from rlx.config.simulation import (
    DistributionConfig,
    SimulateConfig,
    SimulatedFaults,
    SimulatedSessions,
    SimulatedTrainer,
)
from rlx.metrics.jsonl import read_json, read_jsonl
from rlx.metrics.rollout import PASS
from rlx.simulation.fit_engines import ALIKE, SLOWDOWNS, fit_engines
from rlx.simulation.steps import StepFunction

FILE = "timing.jsonl"
POINTS = 33  # quantiles kept of a distribution
LEAST = 20  # sessions to learn a distribution from

Record = Mapping[str, Any]


def from_run(directory: Path, base: Config) -> SimulateConfig:
    """What the run in `directory` says of `config.simulate`; what records do not tell is taken from `base`.

    Raises:
      ConfigError: there are no records, or too few.
    """
    path = directory / FILE
    if not path.is_file():
        way_out = "a run with config.producer.max_policy_lag of 1 or more writes it"
        raise ConfigError(f"--fit={directory}: there is no {FILE}; {way_out}")
    return fit(read_jsonl(path)[0], parse(read_json(directory / "config.json")), base.simulate, str(directory))


def fit(records: Sequence[Record], recorded: Config, base: SimulateConfig, source: str = "records") -> SimulateConfig:
    """recorded: the configuration of the run that wrote the records.

    Raises:
      ConfigError: too few records.
    """
    kinds: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        kinds[record["kind"]].append(record)
    updates = kinds["update"][recorded.metrics.skip_updates :]
    sessions = kinds["session"]
    if len(updates) < 2 or len(sessions) < LEAST:
        raise ConfigError(
            f"{source} holds {len(sessions)} sessions and {len(updates)} updates after the first "
            f"{recorded.metrics.skip_updates} (metrics.skip_updates); at least {LEAST} and 2 are needed"
        )
    engines, slowdown = fit_engines(kinds["response"], kinds["load"], updates, recorded, base.engines)
    busy = busy_seconds(updates, kinds["response"])
    failed = np.mean([s["outcome"] != "graded" for s in sessions])
    return dataclasses.replace(
        base,
        engines=engines,
        sessions=fit_sessions(sessions),
        trainer=fit_trainer(updates, kinds["load"], busy, slowdown, recorded),
        faults=SimulatedFaults(0.0, base.faults.engine_down_seconds, float(failed)),
    )


def fit_trainer(
    updates: Sequence[Record],
    loads: Sequence[Record],
    busy: Sequence[float],
    slowdown: float,
    recorded: Config,
) -> SimulatedTrainer:
    """Seconds of an update by `fit_update`; means of the rest. slowdown: of the engines, while it trains."""
    trained = [u for u in updates if u["tokens"]]
    tokens = np.array([u["tokens"] for u in trained], float)
    seconds = np.array([u["trained"] - u["taken"] for u in trained], float)
    beside = np.array([b for u, b in zip(updates, busy) if u["tokens"]], float)
    constant, slope, own_slowdown = fit_update(tokens, seconds, beside)
    # With drain the engines load later, with barrier they first end what runs: neither is the sending of weights.
    sent = []
    for update in trained:
        inside = [load["sent"] for load in loads if update["trained"] <= load["sent"] <= update["published"]]
        if recorded.producer.publication == "refresh" and inside:
            sent.append(min(inside) - update["trained"])
    return SimulatedTrainer(
        update_seconds=constant,
        seconds_per_token=slope,
        publish_seconds=float(np.mean(sent)) if sent else 0.0,
        other_seconds=float(np.mean([u["ended"] - u["published"] for u in updates])),
        engine_slowdown=slowdown,
        own_slowdown=own_slowdown,
    )


def busy_seconds(updates: Sequence[Record], responses: Sequence[Record]) -> list[float]:
    """Of each update's training, the seconds in which any engine had a request."""
    starts, ends = ([r[key] for r in responses] for key in ("sent", "done"))
    running = StepFunction(np.array([*starts, *ends]), np.repeat([1.0, -1.0], len(responses)))
    edges = np.unique(np.array([*starts, *ends]))
    busy = np.array([float(running.step(edge) > 0.5) for edge in edges])
    level = StepFunction(edges, np.diff(busy, prepend=0.0))
    return [level.area(u["taken"], u["trained"]) for u in updates]


def fit_update(tokens: np.ndarray, seconds: np.ndarray, beside: np.ndarray) -> tuple[float, float, float]:
    """(a, b, slowdown) of an update that takes a + b tokens on its own, and `slowdown` times as long while engines run.

    Nonnegative least squares, the slowdown is searched for. Where engines ran all the time, or never, nothing tells it,
    and it is 1.

    Args:
      tokens, seconds: of updates. beside: of the seconds, those in which engines ran.
    """
    scale = max(float(tokens.mean()), 1.0)
    share = beside / np.maximum(seconds, 1e-12)
    best = (np.inf, np.zeros(2), 1.0)
    for slowdown in SLOWDOWNS if share.std() > ALIKE else (1.0,):
        # Seconds that are expected, not work: the noise is in the former.
        stretch = 1.0 / (1.0 - share + share / slowdown)
        columns = np.stack([stretch, stretch * tokens / scale], 1)
        found, error = scipy.optimize.nnls(columns, seconds)
        if error < best[0]:
            best = (error, found, float(slowdown))
    (constant, slope), slowdown = best[1], best[2]
    return float(constant), float(slope / scale), slowdown


def fit_sessions(sessions: Sequence[Record]) -> SimulatedSessions:
    by_task: defaultdict[str, list[Record]] = defaultdict(list)
    for session in sessions:
        by_task[session["task"]].append(session)
    task_cv, responses = split_by_task([np.concatenate([s["responses"] for s in ss]) for ss in by_task.values()])
    return SimulatedSessions(
        tasks=len(by_task),
        pass_rate=pass_rates([[s["reward"] >= PASS for s in ss] for ss in by_task.values()]),
        task_cv=task_cv,
        open_seconds=quantiles([s["open_seconds"] for s in sessions]),
        prompt_tokens=quantiles([s["prompt_tokens"] for s in sessions]),
        turns=quantiles([len(s["responses"]) for s in sessions]),
        response_tokens=quantiles(responses),
        tool_tokens=quantiles([n for s in sessions for n in s["observations"]]),
        tool_seconds=quantiles([t for s in sessions for t in s["tool_seconds"]]),
        close_seconds=quantiles([s["close_seconds"] for s in sessions]),
        grade_seconds=quantiles([s["grade_seconds"] for s in sessions]),
    )


def quantiles(values: Sequence[float]) -> DistributionConfig:
    if not len(values):
        return DistributionConfig("constant", 0.0, 0.0, ())
    found = np.quantile(np.asarray(values, float), np.linspace(0.0, 1.0, POINTS))
    return DistributionConfig("quantiles", float(np.mean(values)), 0.0, tuple(found.tolist()))


def split_by_task(lengths: Sequence[np.ndarray]) -> tuple[float, list[float]]:
    """(cv of the factor that a task's lengths share, all lengths without it): variance components of log lengths, by
    the method of moments; a task's factor is shrunk towards 1 by how little is known of it."""
    logs = [np.log(np.maximum(x, 1.0)) for x in lengths]
    between, within = components([x.tolist() for x in logs])
    if between <= 0:
        return 0.0, np.concatenate(lengths).tolist()
    mean = float(np.mean(np.concatenate(logs)))
    bare = []
    for x, log in zip(lengths, logs):
        known = between / (between + within / len(log))
        bare.append(x / np.exp(known * (log.mean() - mean)))
    return float(np.sqrt(np.expm1(between))), np.concatenate(bare).tolist()


def pass_rates(passed: Sequence[Sequence[bool]]) -> DistributionConfig:
    """A beta distribution with the mean and the variance between tasks."""
    rate = float(np.mean([p for ps in passed for p in ps]))
    between, _ = components(passed)
    variance = min(between, 0.99 * rate * (1 - rate))
    if variance <= 0:
        return DistributionConfig("constant", rate, 0.0, ())
    return DistributionConfig("beta", rate, float(np.sqrt(variance) / rate), ())


def components(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(variance between, variance within) of a one-way random-effects model, by the ANOVA estimators (Searle, Casella
    and McCulloch, Variance Components, 1992, chapter 3.6). 0 between where groups cannot tell."""
    sizes = np.array([len(g) for g in groups], float)
    means = np.array([np.mean(g) for g in groups])
    total, count = sizes.sum(), len(sizes)
    if count < 2 or total <= count:
        return 0.0, 0.0
    within = sum(float(np.sum((np.asarray(g, float) - m) ** 2)) for g, m in zip(groups, means)) / (total - count)
    grand = float((sizes * means).sum() / total)
    mean_square = float((sizes * (means - grand) ** 2).sum() / (count - 1))
    typical = (total - (sizes**2).sum() / total) / (count - 1)
    return max(0.0, (mean_square - within) / typical), within


def describe(fitted: SimulateConfig) -> list[str]:
    """The fitted values in one line each, for a terminal."""
    sections = dataclasses.asdict(fitted)
    lines = []
    for section in ("engines", "sessions", "trainer"):
        for name, value in sections[section].items():
            shown = f"{value['kind']}, mean {value['mean']:.4g}" if isinstance(value, dict) else f"{value:.6g}"
            lines.append(f"simulate.{section}.{name:<26}{shown}")
    return lines
