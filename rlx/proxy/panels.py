"""What a comparison draws, in its order: a panel a metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from rlx.proxy.runs import Point, RunData


class Panel(NamedTuple):
    key: str  # a metric's name, or a name of its own where it is computed
    title: str
    unit: str
    sums: tuple[str, ...] = ()  # metrics that are added up


EVALUATION = Panel("eval/pass_rate", "held-out pass rate, with its interval", "fraction")
PANELS: tuple[Panel, ...] = (
    EVALUATION,
    Panel("reward/mean", "training reward", "reward"),
    Panel("offpolicy/kl_k3", "KL sampler to trainer", "nats"),
    Panel("offpolicy/ess", "effective sample size", "fraction"),
    Panel("offpolicy/age_mean", "sample age", "updates"),
    Panel("reward/no_signal_fraction", "groups without signal", "fraction"),
    Panel("policy/entropy", "entropy", "nats"),
    Panel("optimizer/grad_norm", "gradient norm", "norm"),
    Panel("time/update_seconds", "an update's training", "s"),
    Panel("time/wait_share", "trainer waits", "share of the time"),
    Panel(
        "dropped groups",
        "dropped groups, so far",
        "groups",
        ("ledger/groups_stale", "ledger/groups_too_long", "ledger/groups_no_signal", "ledger/groups_failed"),
    ),
    Panel("ledger/samples_generated", "samples, so far", "samples"),
    Panel("ledger/tokens_generated", "generated tokens, so far", "tokens"),
    Panel("response/length_mean", "response length", "tokens"),
    Panel("response/stop_reason_stop", "ended by themselves", "fraction"),
    Panel("response/stop_reason_length", "ended by the length limit", "fraction"),
    Panel("response/stop_reason_session_limit", "ended by the session limit", "fraction"),
)


def points_of(run: RunData, panel: Panel) -> Sequence[Point]:
    """What a run has to show in a panel; () where it lacks the metric."""
    if panel == EVALUATION:
        return [e.point for e in run.evaluations]
    if not panel.sums:
        return run.curves.get(panel.key, ())
    there = [run.curves[name] for name in panel.sums if name in run.curves]
    totals: dict[float, list[Point]] = {}
    for point in (p for points in there for p in points):
        totals.setdefault(point.updates, []).append(point)
    return [dataclasses.replace(p[0], value=math.fsum(q.value for q in p)) for _, p in sorted(totals.items())]


def shown_panels(runs: Sequence[RunData]) -> list[Panel]:
    """The panels that at least one run has something for."""
    return [panel for panel in PANELS if any(points_of(run, panel) for run in runs)]
