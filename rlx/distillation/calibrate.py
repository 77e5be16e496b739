"""Which lambda? A short search on held-out reward: short runs of a recipe, from the largest lambda down.

    rlx signal calibrate --config=configs/popd.py --lambdas=2,1.5,1,0.75,0.5 --updates=10

A run that a guard of config.collapse stops ends the search, and so does a held-out pass rate that is clearly below the
best so far: the smaller lambda is, the nearer the policy comes to one token. Runs are kept below RUN/calibration and
are not made again, those that a guard stopped neither; the result is RUN/calibration/calibration.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.metrics.jsonl import read_jsonl, write_json
from rlx.proxy.calibration import fit_lambda
from rlx.train import TrainingStopped, train

TELL_APART = "More --updates, tasks.held_out or eval.attempts_per_task may tell them apart"


class Trial(NamedTuple):
    """A short run at one lambda."""

    lam: float
    pass_rate: float  # held out, after
    low: float  # of its interval
    high: float
    collapsed: str  # why a guard stopped it, "" = none


def calibrate(config: Config, lams: Sequence[float], updates: int, run: Callable[[Config], Trial]) -> dict[str, Any]:
    """What calibration.json holds: best (the largest lambda of the highest pass rate, None where all collapsed),
    tied (lambdas whose intervals overlap with its own), fitted (of a parabola; None for fewer than three that did not
    collapse, or with one pass rate), trials in their order, stopped (why no smaller one was tried).

    Raises ConfigError for a recipe without distillation, or a lambda that it refuses.
    """
    if config.objective.distill.form == "off" or config.objective.distill.signal != "proxy":
        raise ConfigError("config.objective.distill: lambda is one of signals; start from configs/popd.py")
    if not lams or len(set(lams)) < len(lams):
        raise ConfigError(f"--lambdas={list(lams)}: give different ones, e.g. 2,1.5,1,0.75,0.5")
    configs = [short(config, lam, updates) for lam in sorted(lams, reverse=True)]  # all are checked before one runs
    trials: list[Trial] = []
    stopped = ""
    for one in configs:
        trials.append(run(one))
        stopped = ends_search(trials)
        if stopped:
            break
    best = _best(trials)
    fit = fit_lambda({t.lam: [t.pass_rate] for t in trials if not t.collapsed})
    return {
        "best": None if best is None else best.lam,
        "pass_rate": None if best is None else best.pass_rate,
        "tied": [t.lam for t in trials if best is not None and t is not best and _overlap(t, best)],
        "fitted": None if fit is None else fit.best,
        "trials": [t._asdict() for t in trials],
        "stopped": stopped,
        "updates": updates,
    }


def ends_search(trials: Sequence[Trial]) -> str:
    """Why no smaller lambda is to be tried, "" where one is."""
    last, best = trials[-1], _best(trials)
    if last.collapsed:
        return f"lambda {last.lam:g}: {last.collapsed}"
    if best is not None and last.high < best.low:
        return (
            f"lambda {last.lam:g}: the held-out pass rate {last.pass_rate:.3f} is below the {best.pass_rate:.3f} of "
            f"{best.lam:g}, interval for interval"
        )
    return ""


def _best(trials: Sequence[Trial]) -> Trial | None:
    """Of those that no guard stopped: the last score of one that collapsed may be from before."""
    return max((t for t in trials if not t.collapsed), key=lambda t: t.pass_rate, default=None)


def _overlap(one: Trial, other: Trial) -> bool:
    return not one.collapsed and one.low <= other.high and other.low <= one.high


def short(config: Config, lam: float, updates: int) -> Config:
    """The recipe with another lambda and fewer updates. Raises ConfigError where it refuses them."""
    distill = dataclasses.replace(config.objective.distill, lam=lam)
    changed = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, directory=str(home(config)), name=f"lambda={lam:g}".replace(".", "_")),
        objective=dataclasses.replace(config.objective, distill=distill),
        learner=dataclasses.replace(config.learner, updates=updates),
    )
    check(changed)
    return changed


def home(config: Config) -> Path:
    return config.run.path / "calibration"


def trial(config: Config) -> Trial:
    """Runs it; a guard that stops it is a result."""
    collapsed = ""
    try:
        train(config)
    except TrainingStopped as stopped:
        collapsed = str(stopped)
    records, _ = read_jsonl(config.run.path / "metrics.jsonl")
    last = [r for r in records if "eval/pass_rate" in r][-1]
    rates = (last["eval/pass_rate"], last["eval/pass_rate_low"], last["eval/pass_rate_high"])
    return Trial(config.objective.distill.lam, *rates, collapsed)


def search(config: Config, lams: Sequence[float], updates: int) -> dict[str, Any]:
    """`calibrate` with runs for real; writes calibration.json."""
    found = calibrate(config, lams, updates, trial)
    write_json(home(config) / "calibration.json", found)
    return found


def described(found: dict[str, Any]) -> list[str]:
    """The result in words."""
    lines = [
        f"lambda {t['lam']:g}: pass rate {t['pass_rate']:.3f} [{t['low']:.3f}, {t['high']:.3f}]"
        + (", collapsed" if t["collapsed"] else "")
        for t in found["trials"]
    ]
    if found["stopped"]:
        lines.append(f"the search ended: {found['stopped']}")
    if found["best"] is None:
        return [*lines, "every lambda that was tried collapsed: try larger ones with --lambdas"]
    stood = [t for t in found["trials"] if not t["collapsed"]]
    if len(stood) > 1 and len({t["pass_rate"] for t in stood}) == 1:
        return [*lines, f"no lambda is better than another: they cannot be told apart. {TELL_APART}"]
    if found["tied"]:
        tied = ", ".join(f"{lam:g}" for lam in found["tied"])
        lines.append(f"not clearly better than {tied}, whose intervals overlap with its own. {TELL_APART}")
    fitted = "" if found["fitted"] is None else f", {found['fitted']:.2f} by a parabola"
    return [*lines, f"best lambda {found['best']:g}{fitted}: --config.objective.distill.lam={found['best']:g}"]
