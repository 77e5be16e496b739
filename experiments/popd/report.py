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
from experiments.popd.run import LAMBDAS, LINES, SEEDS, SHARE_KEPT, UPDATE_SHARE, Result, results
from rlx.models.spec import count_parameters
from rlx.proxy.calibration import Fit, fit_lambda
from rlx.proxy.report import Table, markdown_table

PAGE = Path("docs/popd_study.md")
CONFIDENCE = 0.95
GAIN_SHARE = 0.9  # of P-OPD's gain, to which updates are counted
HEAD = """# Proxy OPD at small scale: does what a proxy learned move onto a better target?

Three models of one family that this project trains itself: the target has {target:,} parameters, the proxies `mid`
{mid:,} and `small` {small:,}. A question is five digits, the answer the same digits sorted from the largest down. Each
base comes from supervised steps on answers with wrong digits in them, more for the proxies than for the target; a
proxy's expert is its base after {updates} updates of RL, so few that the target's base still passes more often than
either expert. Every transfer makes 20 updates of 64 samples, direct RL 60, all at one learning rate; distillation is
summed over the whole vocabulary. A score is the pass rate on 100 held-out questions, 4 attempts at each; an interval is
Student's over the seeds, each of which has experts of its own.

Lines, seeds and thresholds are fixed in `experiments/popd/run.py`. The number of the experts' updates and the sizes
were chosen by trial before the lines of this page were run. It is written by `python -m experiments.popd.report` from
`experiments/popd/results.csv`, which `python -m experiments.popd.run` adds to, run by run.
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
                str(len(kept)),
                "; ".join(r.expert for r in kept if r.expert) or "–",
                str(spread([r.before for r in kept])),
                str(spread([r.after for r in kept])),
                str(spread(found.gains(line.name))),
                ", ".join(f"{r.after:.3f}" for r in kept),
                f"{stopped} of {len(kept)}" if kept else "–",
            ]
        )
    header = ["line", "seeds", "experts", "before", "after", "gain", "each seed", "stopped as collapsed"]
    return Table("Scores", header, rows)


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


def claims(found: Found) -> list[tuple[str, str, bool | None]]:
    """(what is claimed, what was found, does it hold)."""
    lines: list[tuple[str, str, bool | None]] = []
    for proxy in LAMBDAS:
        best = found.best(proxy)
        if best is None:
            continue
        name = popd_line(proxy, best[0])
        gain, expert = spread(found.gains(name)), np.mean([float(r.expert) for r in found.of(name)])
        before = np.mean([r.before for r in found.of(name)])
        text = f"{name}: {gain} over {before:.3f}; the expert has {expert:.3f}"
        lines.append((f"P-OPD from `{proxy}` improves a target that beats its expert", text, positive(gain)))
        gap = spread(found.differences(name, f"OPD {proxy}"))
        if gap.seeds:
            text = f"{gap} between them; OPD's own gain is {spread(found.gains(f'OPD {proxy}'))}"
            lines.append((f"OPD from `{proxy}` gains less", text, positive(gap)))
    return [*lines, *_collapse(found), *_lambdas(found), *_hops(found), *_updates(found)]


def _collapse(found: Found) -> list[tuple[str, str, bool | None]]:
    least, other = (popd_line("{}", lam) + ", 60 updates, learning rate 1e-3" for lam in (0.05, 0.5))
    kept, control = ([r for p in LAMBDAS for r in found.of(name.format(p))] for name in (least, other))
    if not kept:
        return []
    caught, spared = sum(bool(r.collapsed) for r in kept), sum(not r.collapsed for r in control)
    text = (
        f"at lambda 0.05 a guard stopped {caught} of {len(kept)} runs of 60 updates at learning rate 1e-3, at 0.5 it "
        f"let {spared} of {len(control)} end; mean pass rates {_mean(kept)} and {_mean(control)}"
    )
    return [("Too small a lambda collapses and is caught", text, caught == len(kept) and spared == len(control))]


def _mean(kept: list[Result]) -> str:
    return f"{np.mean([r.after for r in kept]):.3f}" if kept else "–"


def _lambdas(found: Found) -> list[tuple[str, str, bool | None]]:
    fits = {}
    for proxy, lams in LAMBDAS.items():
        points = [(lam, [r.after for r in found.of(popd_line(proxy, lam))]) for lam in lams]
        fits[proxy] = fit_lambda({lam: scores for lam, scores in points if scores})
    mid, small = fits["mid"], fits["small"]
    if mid is None or small is None:
        return []
    claim = "The best lambda is larger for the smaller proxy"
    lines = [(f"{claim}, after 20 updates", *_larger(mid, small))]
    ends = {proxy: optimum_fit(proxy) for proxy in LAMBDAS} if OPTIMA.is_file() else {}
    last, other = ends.get("mid"), ends.get("small")
    if last is not None and other is not None:
        lines.append((f"{claim}, in the end (below)", *_larger(last, other)))
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


def _hops(found: Found) -> list[tuple[str, str, bool | None]]:
    two, one = "two hops mid to small", popd_line("mid", 1.0)
    hops, direct = found.lines.get(two, {}), found.lines.get(one, {})
    shares = [
        (hops[s].after - hops[s].before) / (direct[s].after - direct[s].before)
        for s in SEEDS
        if s in hops and s in direct and direct[s].after > direct[s].before
    ]
    if not shares:
        return []
    share = spread(shares)
    text = f"{share} of the gain of one hop at lambda 1"
    holds = positive(Spread(share.mean - SHARE_KEPT, share.low - SHARE_KEPT, share.high - SHARE_KEPT, share.seeds))
    return [(f"Two hops keep most of the gain (more than {SHARE_KEPT:.0%})", text, holds)]


def _updates(found: Found) -> list[tuple[str, str, bool | None]]:
    best = found.best("mid")
    few = "2 tasks an update"
    pairs = [] if best is None else [(popd_line("mid", best[0]), "direct RL", "")]
    pairs.append((f"P-OPD mid lambda 0.05, {few}", f"direct RL, {few}", f", with {few}"))
    fast = "learning rate 1e-3"
    pairs.append((f"P-OPD mid lambda 0.5, 60 updates, {fast}", f"direct RL, {fast}", f", with {fast}"))
    lines: list[tuple[str, str, bool | None]] = []
    for name, rl, where in pairs:
        shares, shown = [], []
        for seed, own in found.lines.get(name, {}).items():
            direct = found.lines.get(rl, {}).get(seed)
            if direct is not None and own.after > own.before:
                goal = own.before + GAIN_SHARE * (own.after - own.before)
                took = updates_to(own.curve, goal), updates_to(direct.curve, goal)
                shares.append(took[0] / took[1])
                shown.append(f"{took[0]:.0f} against {took[1]:.0f}")
        if shares:
            share = spread(shares)
            text = f"updates to {GAIN_SHARE:.0%} of the gain of {name}: {'; '.join(shown)}; ratio {share}"
            low, high = UPDATE_SHARE - share.high, UPDATE_SHARE - share.low
            holds = positive(Spread(UPDATE_SHARE - share.mean, low, high, share.seeds))
            lines.append((f"P-OPD needs at most a third of direct RL's updates{where}", text, holds))
    return lines


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
    return Table("Where each lambda leads in the end", header, shown)


def page(kept: list[Result], remarks: str) -> str:
    found = Found(kept)
    sizes = {name: count_parameters(models.architecture(name)) for name in models.SIZES}
    every = len(LINES) * len(SEEDS)
    parts = [HEAD.format(updates=EXPERT_UPDATES, **sizes)]
    if len(kept) < every:
        parts.append(f"{len(kept)} of {every} runs are done; what follows is of these.\n")
    said = Table("What was asked", ["claim", "found", "verdict"], [[a, b, verdict(c)] for a, b, c in claims(found)])
    for shown in (said, *([optima()] if OPTIMA.is_file() else []), table(found)):
        parts.append(f"## {shown.title}\n\n" + "\n".join(markdown_table(shown)) + "\n")
    reasons = [f"* {r.line}, seed {r.seed}, after {r.updates} updates: {r.collapsed}" for r in kept if r.collapsed]
    if reasons:
        parts.append("## Runs that a guard stopped\n\n" + "\n".join(reasons) + "\n")
    parts.append(f"## Cost\n\nAll runs took {sum(r.seconds for r in kept) / 60:.0f} CPU-minutes.\n")
    return "\n".join(parts) + remarks


def main() -> int:
    file = Path(__file__).with_name("remarks.md")
    kept = results()
    PAGE.write_text(page(kept, "\n" + file.read_text(encoding="utf-8") if file.is_file() else ""), encoding="utf-8")
    print(f"wrote {PAGE} of {len(kept)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
