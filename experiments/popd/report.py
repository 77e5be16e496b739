"""The transfer study's page, from the scores in experiments/popd/results.csv: docs/popd_study.md.

python -m experiments.popd.report
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.popd import models
from experiments.popd.optimum import OPTIMA
from experiments.popd.recipe import EXPERT_UPDATES
from experiments.popd.run import (
    AS_FAST,
    HOP_LAM,
    LAMBDAS,
    LINES,
    NOT_YET,
    RUNS,
    SEEDS,
    SHARE_KEPT,
    STILL_NOT,
    TOO_FAST,
    UNDECIDED,
    UPDATE_SHARE,
    Result,
    results,
)
from rlx.models.spec import count_parameters
from rlx.proxy.calibration import Fit, fit_lambda
from rlx.proxy.report import Table, markdown_table

PAGE = Path("docs/popd_study.md")
CONFIDENCE = 0.95
GAIN_SHARE = 0.9  # of P-OPD's gain, to which updates are counted
LAM = 1.0  # of the recipe, at which claims are tested
BEFORE = "beforehand"
AT_ONE = "beforehand, for the best lambda; for 1 later, as these attempts chose the best"
HEAD = """# Proxy OPD at small scale: does what a proxy learned move onto a better target?

Three models of one family that this project trains itself: the target has {target:,} parameters, the proxies `mid`
{mid:,} and `small` {small:,}. A question is five digits, the answer the same digits sorted from the largest down. Each
base comes from supervised steps on answers with wrong digits in them, more for the proxies than for the target; a
proxy's expert is its base after {updates} updates of RL, so few that the target's base still passes more often than
either expert. Every transfer makes 20 updates of 64 samples, direct RL 60, all at one learning rate; distillation is
summed over the whole vocabulary. A score is the pass rate on 100 held-out questions, 4 attempts at each; an interval is
Student's over the seeds, each of which has experts of its own. The interval of a fitted lambda is a bootstrap
over three seeds, which is too narrow: that two do not overlap is a hint.

Seeds, thresholds and most lines were fixed before the first of these runs; both tables say what was not, and what led
to it. The number of the experts' updates and the sizes were chosen by trial before that. Everything is defined in
`experiments/popd/run.py`, which adds to `experiments/popd/results.csv` run by run; `python -m experiments.popd.report`
writes this page from it.
"""


class Spread(NamedTuple):
    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if not self.seeds:
            return "–"
        interval = f" [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else ""
        return f"{self.mean:.3f}{interval}"


def spread(values: list[float]) -> Spread:
    """Mean with Student's interval."""
    if len(values) < 2:
        mean = values[0] if values else float("nan")
        return Spread(mean, float("nan"), float("nan"), len(values))
    x = np.array(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 1)) * x.std(ddof=1) / np.sqrt(len(x))
    return Spread(float(x.mean()), float(x.mean() - half), float(x.mean() + half), len(x))


class Found:
    """The results by line, and what is asked of them."""

    def __init__(self, kept: list[Result]):
        self.lines: dict[str, dict[int, Result]] = {}
        for result in kept:
            self.lines.setdefault(result.line, {})[result.seed] = result

    def of(self, line: str) -> list[Result]:
        return list(self.lines.get(line, {}).values())

    def gains(self, line: str) -> list[float]:
        return [r.after - r.before for r in self.of(line)]

    def differences(self, line: str, other: str) -> list[float]:
        """Of the scores, seed by seed."""
        mine, theirs = self.lines.get(line, {}), self.lines.get(other, {})
        return [mine[s].after - theirs[s].after for s in SEEDS if s in mine and s in theirs]

    def best(self, proxy: str) -> tuple[float, float] | None:
        """(lambda, mean score) of the best line of a proxy."""
        scores = {lam: self.of(popd_line(proxy, lam)) for lam in LAMBDAS[proxy]}
        means = {lam: float(np.mean([r.after for r in found])) for lam, found in scores.items() if found}
        return max(means.items(), key=lambda item: item[1]) if means else None


def popd_line(proxy: str, lam: float) -> str:
    return f"P-OPD {proxy} lambda {lam:g}"


def table(found: Found) -> Table:
    rows = []
    for line in LINES:
        kept = found.of(line.name)
        stopped = sum(bool(r.collapsed) for r in kept)
        rows.append(
            [
                line.name,
                later(line.added) if line.added else BEFORE,
                str(len(kept)),
                "; ".join(r.expert for r in kept if r.expert) or "–",
                str(spread([r.before for r in kept])),
                str(spread([r.after for r in kept])),
                str(spread(found.gains(line.name))),
                ", ".join(f"{r.after:.3f}" for r in kept),
                f"{stopped} of {len(kept)}" if kept else "–",
            ]
        )
    header = ["line", "fixed", "seeds", "experts", "before", "after", "gain", "each seed", "stopped as collapsed"]
    return Table("Scores", header, rows)


class Claim(NamedTuple):
    text: str
    fixed: str  # before the first run, or what led to it
    found: str
    holds: bool | None  # None: not decided


def updates_to(curve: dict[int, float], score: float) -> float:
    """The update at which a run first has `score`, between evaluations in proportion; infinite where it never has."""
    before = (0, curve[0])
    for update, rate in sorted(curve.items()):
        if rate >= score:
            share = (score - before[1]) / (rate - before[1]) if rate > before[1] else 1.0
            return before[0] + share * (update - before[0])
        before = (update, rate)
    return float("inf")


# --------------------------------------------------------------------------------------------------------------- claims


def verdict(holds: bool | None) -> str:
    return {None: "not decided", True: "holds", False: "does not hold"}[holds]


def positive(x: Spread) -> bool | None:
    """Is it above 0? None where its interval, or a single seed, does not say."""
    if x.seeds < 2:
        return None
    return True if x.low > 0 else False if x.high < 0 else None


def claims(found: Found) -> list[Claim]:
    """What is claimed, and what was found."""
    gains = [claim for proxy in LAMBDAS for claim in _gains(found, proxy)]
    return [*gains, *_collapse(found), *_lambdas(found), *_hops(found), *_updates(found)]


def _gains(found: Found, proxy: str) -> list[Claim]:
    name, teacher = popd_line(proxy, LAM), f"OPD {proxy}"
    if not found.of(name):
        return []
    gain, expert = spread(found.gains(name)), np.mean([float(r.expert) for r in found.of(name)])
    before = np.mean([r.before for r in found.of(name)])
    text = f"{name}: {gain} over {before:.3f}; the expert has {expert:.3f}"
    lines = [Claim(f"P-OPD from `{proxy}` improves a target that beats its expert", AT_ONE, text, positive(gain))]
    gap = spread(found.differences(name, teacher))
    if gap.seeds:
        text = f"{gap} between them; OPD's own gain is {spread(found.gains(teacher))}"
        lines.append(Claim(f"OPD from `{proxy}` gains less", AT_ONE, text, positive(gap)))
    return lines


def _collapse(found: Found) -> list[Claim]:
    """The least lambda, with 0.5 as a control where there is one."""
    settings = (
        ("in 20 updates", "", BEFORE),
        ("in 60 updates", ", 60 updates", later(NOT_YET)),
        ("in 60 updates at learning rate 3e-3", ", 60 updates, learning rate 3e-3", later(STILL_NOT)),
        ("in 60 updates at learning rate 1e-3", ", 60 updates, learning rate 1e-3", later(TOO_FAST)),
    )
    lines = []
    for where, end, fixed in settings:
        kept, control = ([r for p in LAMBDAS for r in found.of(popd_line(p, lam) + end)] for lam in (0.05, 0.5))
        if not kept:
            continue
        caught, spared = sum(bool(r.collapsed) for r in kept), sum(not r.collapsed for r in control)
        text = f"a guard stopped {caught} of {len(kept)} runs at lambda 0.05, mean pass rate {_mean(kept)}"
        if control:
            text += f"; at 0.5 it let {spared} of {len(control)} end, {_mean(control)}"
        holds = caught == len(kept) and spared == len(control)
        lines.append(Claim(f"Too small a lambda collapses and is caught, {where}", fixed, text, holds))
    return lines


def later(why: str) -> str:
    return f"later: {why}"


def _mean(kept: list[Result]) -> str:
    return f"{np.mean([r.after for r in kept]):.3f}" if kept else "–"


def _lambdas(found: Found) -> list[Claim]:
    fits = {}
    for proxy, lams in LAMBDAS.items():
        points = [(lam, [r.after for r in found.of(popd_line(proxy, lam))]) for lam in lams]
        fits[proxy] = fit_lambda({lam: scores for lam, scores in points if scores})
    mid, small = fits["mid"], fits["small"]
    if mid is None or small is None:
        return []
    claim = "The best lambda is larger for the smaller proxy"
    lines = [Claim(f"{claim}, after 20 updates", BEFORE, *_larger(mid, small))]
    ends = {proxy: optimum_fit(proxy) for proxy in LAMBDAS} if OPTIMA.is_file() else {}
    last, other = ends.get("mid"), ends.get("small")
    if last is not None and other is not None:
        fixed = later("after 20 updates of two seeds the intervals overlapped")
        lines.append(Claim(f"{claim}, at the optima themselves (below)", fixed, *_larger(last, other)))
    return lines


def _larger(mid: Fit, small: Fit) -> tuple[str, bool | None]:
    apart = mid.high < small.low or small.high < mid.low
    return f"fitted lambda* {mid} with `mid`, {small} with `small`", small.best > mid.best if apart else None


def optimum_rates(column: str, proxy: str) -> dict[float, list[float]]:
    """lambda -> of each seed."""
    with OPTIMA.open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["proxy"] == proxy]
    lams = sorted({float(r["lambda"]) for r in rows})
    return {lam: [float(r[column]) for r in rows if float(r["lambda"]) == lam] for lam in lams}


def optimum_fit(proxy: str) -> Fit | None:
    return fit_lambda(optimum_rates("pass_rate", proxy))


def _hops(found: Found) -> list[Claim]:
    two, one = "two hops mid to small", popd_line("mid", HOP_LAM)
    first = _kept(found, two, one)
    more = _kept(found, f"{two}, further seeds", f"{one}, further seeds")
    settings = [("", BEFORE, first)]
    settings += [(", with further seeds", later(UNDECIDED), [*first, *more])] if more else []
    lines = []
    for where, fixed, shares in settings:
        if shares:
            x = spread(shares)
            text = f"{x} of the gain of one hop at lambda {HOP_LAM:g}, {x.seeds} seeds"
            holds = positive(Spread(x.mean - SHARE_KEPT, x.low - SHARE_KEPT, x.high - SHARE_KEPT, x.seeds))
            claim = f"Two hops keep most of the gain (more than {SHARE_KEPT:.0%}){where}"
            lines.append(Claim(claim, fixed, text, holds))
    return lines


def _kept(found: Found, two: str, one: str) -> list[float]:
    """Of one hop's gain, seed by seed."""
    hops, direct = found.lines.get(two, {}), found.lines.get(one, {})
    return [
        (hops[s].after - hops[s].before) / (direct[s].after - direct[s].before)
        for s in hops
        if s in direct and direct[s].after > direct[s].before
    ]


def _updates(found: Found) -> list[Claim]:
    few, fast = "2 tasks an update", "learning rate 1e-3"
    best = found.best("mid")
    pairs = [(popd_line("mid", LAM), "direct RL", "", AT_ONE)]
    if best is not None:
        pairs.append((popd_line("mid", best[0]), "direct RL", ", at the best lambda", BEFORE))
    pairs.append((f"P-OPD mid lambda 0.05, {few}", f"direct RL, {few}", f", with {few}", later(AS_FAST)))
    name = f"P-OPD mid lambda 0.5, 60 updates, {fast}"
    pairs.append((name, f"direct RL, {fast}", f", with {fast}", later(TOO_FAST)))
    lines = []
    for name, rl, where, fixed in pairs:
        shares, shown = _times(found.lines.get(name, {}), found.lines.get(rl, {}))
        if shares:
            share = spread(shares)
            text = f"updates to {GAIN_SHARE:.0%} of the gain of {name}: {'; '.join(shown)}; ratio {share}"
            low, high = UPDATE_SHARE - share.high, UPDATE_SHARE - share.low
            holds = positive(Spread(UPDATE_SHARE - share.mean, low, high, share.seeds))
            lines.append(Claim(f"P-OPD needs at most a third of direct RL's updates{where}", fixed, text, holds))
    return lines


def _times(transfers: dict[int, Result], direct: dict[int, Result]) -> tuple[list[float], list[str]]:
    """Updates to most of a transfer's gain over those that RL takes to it, seed by seed; and both in words."""
    shares, shown = [], []
    for seed, own in transfers.items():
        if seed in direct and own.after > own.before:
            goal = own.before + GAIN_SHARE * (own.after - own.before)
            took = updates_to(own.curve, goal), updates_to(direct[seed].curve, goal)
            shares.append(took[0] / took[1])
            shown.append(f"{took[0]:.0f} against {took[1]:.0f}")
    return shares, shown


def optima() -> Table:
    """Pass rates of the optima themselves, the mean over seeds."""
    header, shown = ["lambda"], []
    for proxy in LAMBDAS:
        rates = optimum_rates("pass_rate", proxy)
        header = ["lambda", *(f"{lam:g}" for lam in rates)]
        best = f"`{proxy}`: pass rate, best at {optimum_fit(proxy)}"
        shown.append([best, *(f"{np.mean(x):.3f}" for x in rates.values())])
        strange = optimum_rates("not_digits", proxy)
        shown.append(["answers with other tokens than digits", *(f"{np.mean(x):.3f}" for x in strange.values())])
    return Table("Where each lambda leads in the end, on the held-out questions", header, shown)


def page(kept: list[Result], remarks: str) -> str:
    found = Found(kept)
    sizes = {name: count_parameters(models.architecture(name)) for name in models.SIZES}
    parts = [HEAD.format(updates=EXPERT_UPDATES, **sizes)]
    if len(kept) < RUNS:
        parts.append(f"{len(kept)} of {RUNS} runs are done; what follows is of these.\n")
    rows = [[*claim[:3], verdict(claim.holds)] for claim in claims(found)]
    said = Table("What was asked", ["claim", "fixed", "found", "verdict"], rows)
    for shown in (said, *([optima()] if OPTIMA.is_file() else []), table(found)):
        parts.append(f"## {shown.title}\n\n" + "\n".join(markdown_table(shown)) + "\n")
    reasons = [f"* {r.line}, seed {r.seed}, after {r.updates} updates: {r.collapsed}" for r in kept if r.collapsed]
    if reasons:
        parts.append("## Runs that a guard stopped\n\n" + "\n".join(reasons) + "\n")
    minutes = sum(r.seconds for r in kept) / 60
    parts.append(
        f"## Cost\n\nThe runs of these lines took {minutes:.0f} CPU-minutes. The bases and the experts, which lines "
        "share, are made before them and are not counted in it.\n"
    )
    return "\n".join(parts) + remarks


def main() -> int:
    file = Path(__file__).with_name("remarks.md")
    kept = results()
    PAGE.write_text(page(kept, "\n" + file.read_text(encoding="utf-8") if file.is_file() else ""), encoding="utf-8")
    print(f"wrote {PAGE} of {len(kept)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
