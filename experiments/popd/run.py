"""Does what a proxy learned move onto a target that is better than the proxy's expert? Three seeds of each line.

python -m experiments.popd.run [--seconds=600]     makes what is missing, one run after the other, and may be stopped
python -m experiments.popd.report                  the page of what there is: docs/popd_study.md

Seeds, thresholds and the lines without `added` were fixed before anything ran; a line that came later says why. A
score is the pass rate on 100 held-out questions x
4 attempts; of a run that a guard stopped it is that of its last evaluation.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tqdm import tqdm

from configs.rl import HOME
from experiments.popd import prepare
from experiments.study.run import cpu_seconds
from rlx.config.flags import config_from_argv
from rlx.metrics.jsonl import read_jsonl
from rlx.train import TrainingStopped, train

RESULTS = Path("experiments/popd/results.csv")
COLUMNS = ("line", "seed", "before", "after", "updates", "seconds", "collapsed", "evaluations", "expert")
SEEDS = (0, 1, 2)
LAMBDAS = {"mid": (0.05, 0.25, 0.5, 1.0, 2.0), "small": (0.05, 0.25, 0.5, 1.0, 2.0)}
HOP_LAM, SHARE_KEPT, UPDATE_SHARE = 1.0, 0.5, 1 / 3  # of two hops; "most of the gain"; of direct RL's updates
POPD, OPD, RL = "configs/popd.py", "configs/opd.py", "configs/rl.py:long"


class Line(NamedTuple):
    """One line of the study: what a run of it learns from, and the changes to its recipe."""

    name: str
    recipe: str
    sources: tuple[str, ...] = ()  # proxies, "mid@10" = an expert of 10 updates, "hop" = the two-hop signal
    changes: tuple[tuple[str, str], ...] = ()
    added: str = ""  # what led to it, where it was not there when the first run began
    seeds: tuple[int, ...] = SEEDS


def popd(name: str, sources: tuple[str, ...], lam: float, *changes: tuple[str, str]) -> Line:
    weights = f"({', '.join([str(1 / len(sources))] * len(sources))},)"
    own = (("objective.distill.lam", str(lam)), ("objective.distill.weights", weights))
    return Line(name, POPD, sources, (*own, *changes))


def later(why: str, *lines: Line) -> tuple[Line, ...]:
    """Lines that were not there when the first run began."""
    return tuple(line._replace(added=why) for line in lines)


LONG, FEW = ("learner.updates", "60"), ("rollout.tasks_per_update", "2")
FAST, FASTER = ("learner.learning_rate", "1e-3"), ("learner.learning_rate", "3e-3")
NOT_YET = "in 20 updates of the first seed nothing had collapsed"
STILL_NOT = "in 60 updates lambda 0.05 had not collapsed either"
TOO_FAST = "at 3e-3 lambda 0.5 had collapsed too"
AS_FAST = "direct RL of the first seed was as fast"
UNDECIDED = "three seeds had not decided about two hops"
FURTHER = (3, 4, 5)  # seeds

FIRST: tuple[Line, ...] = (
    Line("direct RL", RL),
    Line("OPD mid", OPD, ("mid",)),
    *(popd(f"P-OPD mid lambda {lam:g}", ("mid",), lam) for lam in LAMBDAS["mid"]),
    *(popd(f"P-OPD small lambda {lam:g}", ("small",), lam) for lam in LAMBDAS["small"]),
    popd("two hops mid to small", ("hop",), HOP_LAM),
)


def fast(why: str, rate: tuple[str, str]) -> tuple[Line, ...]:
    """The least lambda with 60 updates at another learning rate, and a control."""
    named = f"60 updates, learning rate {rate[1]}"
    lines = [
        popd(f"P-OPD {proxy} lambda {lam:g}, {named}", (proxy,), lam, LONG, rate)
        for lam in (0.05, 0.5)
        for proxy in ("small", "mid")
    ]
    return later(why, *lines)


THEN: tuple[Line, ...] = (
    *fast(TOO_FAST, FAST),
    *fast(STILL_NOT, FASTER),
    *later(TOO_FAST, Line("direct RL, learning rate 1e-3", RL, (), (FAST,))),
    *later(AS_FAST, Line("direct RL, 2 tasks an update", RL, (), (FEW,))),
    *later(AS_FAST, popd("P-OPD mid lambda 0.05, 2 tasks an update", ("mid",), 0.05, FEW)),
    Line("OPD small", OPD, ("small",)),
)
LAST: tuple[Line, ...] = (
    *later(NOT_YET, popd("P-OPD small lambda 0.05, 60 updates", ("small",), 0.05, LONG)),
    *later(NOT_YET, popd("P-OPD mid lambda 0.05, 60 updates", ("mid",), 0.05, LONG)),
    popd("vote of mid and small", ("mid", "small"), 1.0, ("objective.distill.combine", "vote")),
    popd("mean of mid and small", ("mid", "small"), 1.0),
    popd("mid expert of 10 updates", ("mid@10",), 1.0),
    popd("small expert of 10 updates", ("small@10",), 1.0),
    *later(
        "the proxy was made later; no result led to it",
        popd("P-OPD from a proxy of an older family", ("older",), 1.0),
        Line("OPD from a proxy of an older family", OPD, ("older",)),
    ),
    Line("OPD-FT mid", f"{OPD}:rewarded", ("mid",)),
    Line("OPD-URM mid", f"{OPD}:agreeing", ("mid",)),
    popd("P-OPD mid, sampled form", ("mid",), 1.0, ("objective.distill.form", "sampled")),
    popd("P-OPD mid, lambda 0.5 by entropy", ("mid",), 0.5, ("objective.distill.calibration", "entropy")),
    *later(
        "to stand beside entropy, before a run of either",
        popd(
            "P-OPD mid, lambda 0.5 by overlap",
            ("mid",),
            0.5,
            ("objective.distill.calibration", "overlap"),
            ("rollout.head_size", "4"),
        ),
    ),
)
HOPS = tuple(
    line._replace(name=f"{line.name}, further seeds", added=UNDECIDED, seeds=FURTHER)
    for line in (popd(f"P-OPD mid lambda {HOP_LAM:g}", ("mid",), HOP_LAM), FIRST[-1])
)
TIERS = (FIRST, THEN, LAST, HOPS)
LINES = (*FIRST, *THEN, *LAST, *HOPS)
RUNS = sum(len(line.seeds) for line in LINES)


class Result(NamedTuple):
    line: str
    seed: int
    before: float
    after: float
    updates: int
    seconds: float  # CPU
    collapsed: str  # the guard's reason, "" = none
    evaluations: str  # JSON, update -> pass rate
    expert: str  # pass rates of the experts it learned from

    @property
    def curve(self) -> dict[int, float]:
        return {int(update): rate for update, rate in json.loads(self.evaluations).items()}


def results() -> list[Result]:
    """What is kept, also where the runs themselves are gone."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="", encoding="utf-8") as lines:
        return [_result(row) for row in csv.DictReader(lines)]


def _result(row: dict[str, Any]) -> Result:
    kinds = (str, int, float, float, int, float, str, str, str)
    return Result(*(kind(row[name]) for kind, name in zip(kinds, COLUMNS, strict=True)))


def missing() -> Iterator[tuple[Line, int]]:
    """The first lines of all seeds, then the others."""
    done = {(r.line, r.seed) for r in results()}
    for lines in TIERS:
        pairs = sorted(((line, seed) for line in lines for seed in line.seeds), key=lambda pair: pair[1])
        yield from ((line, seed) for line, seed in pairs if (line.name, seed) not in done)


# -------------------------------------------------------------------------------------------------------------- sources


def expert_of(source: str, seed: int) -> Path:
    name, _, updates = source.partition("@")
    return prepare.expert(name, seed, int(updates) if updates else None)


def hop(seed: int) -> Path:
    """The small proxy trained by the mid one's signal; its directory."""
    name = f"hop_seed={seed}"
    if not (Path(HOME) / name / "summary.json").is_file():
        line = popd("hop", ("mid",), HOP_LAM, ("model.path", str(prepare.base_model("small"))))
        _train(line, seed, name)
    return Path(HOME) / name


def signal_of(source: str, seed: int) -> Path:
    name = f"{source.replace('@', '_')}_seed={seed}"
    if source == "hop":
        return prepare.make_signal(name, prepare.base_model("small"), hop(seed))
    return prepare.make_signal(name, prepare.base_model(source.partition("@")[0]), expert_of(source, seed))


def _train(line: Line, seed: int, name: str) -> dict[str, Any]:
    words = [f"--config={line.recipe}", f"--config.run.name={name}", f"--config.run.seed={seed}"]
    if line.recipe.startswith(POPD):
        words.append(f"--config.frozen.signals={tuple(str(signal_of(s, seed)) for s in line.sources)!r}")
    elif line.recipe.startswith(OPD):
        words.append(f"--config.frozen.teachers={tuple(str(expert_of(s, seed) / 'model') for s in line.sources)!r}")
    words += [f"--config.{key}={value}" for key, value in line.changes]
    return train(config_from_argv(["popd", *words], flags.FlagValues()))


def run_one(line: Line, seed: int) -> Result:
    """One run. A guard that stops it is a result too."""
    prepare.base_model(prepare.TARGET)
    name = f"{line.name.replace(' ', '_').replace(',', '')}_seed={seed}"
    experts = [hop(seed) if source == "hop" else expert_of(source, seed) for source in line.sources]
    for source in line.sources if line.recipe == POPD else ():
        signal_of(source, seed)
    before, collapsed = cpu_seconds(), ""
    try:
        _train(line, seed, name)
    except TrainingStopped as stopped:
        collapsed = str(stopped)
    records, _ = read_jsonl(Path(HOME) / name / "metrics.jsonl")
    curve = {r["update"]: round(r["eval/pass_rate"], 4) for r in records if "eval/pass_rate" in r}
    rates = ", ".join(f"{_last_rate(run):.3f}" for run in experts)
    first, last = curve[0], curve[max(curve)]
    updates = max(r["update"] for r in records)
    spent = round(cpu_seconds() - before, 1)
    return Result(line.name, seed, first, last, updates, spent, collapsed, json.dumps(curve), rates)


def _last_rate(run: Path) -> float:
    records, _ = read_jsonl(run / "metrics.jsonl")
    return float([r["eval/pass_rate"] for r in records if "eval/pass_rate" in r][-1])


def keep(result: Result) -> None:
    fresh = not RESULTS.is_file()
    with RESULTS.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerows(([COLUMNS] if fresh else []) + [result])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.popd.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after so long")
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.seconds
    with tqdm(list(missing()), desc="runs", file=sys.stderr) as bar:
        for number, (line, seed) in enumerate(bar):
            if number and time.monotonic() > until:
                break
            bar.set_postfix_str(f"{line.name}, seed {seed}")
            keep(run_one(line, seed))
    print(f"{len(list(missing()))} of {RUNS} runs are left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
