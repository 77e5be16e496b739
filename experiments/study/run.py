"""Does a cheap model rank configurations as a dear one does? Ten configurations, 3 seeds, a target and two proxies.

python -m experiments.study.run [--seconds=200]     trains what is missing, one run after the other, and may be stopped
python -m experiments.study.report                  scores, rankings and figures of what there is

A run takes about 10 CPU-seconds, and the first of a process twice as many, for compiling. Its score is the pass rate on
60 held-out questions x 4 attempts after 24 updates.
"""

from __future__ import annotations

import argparse
import csv
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from absl import flags
from tqdm import tqdm

from experiments.study import models
from experiments.study.recipe import HOME
from rlx import sft
from rlx.config.flags import config_from_argv
from rlx.proxy import sweep
from rlx.proxy.sweep import Planned
from rlx.train import train

RECIPE = "experiments/study/recipe.py"
RESULTS = Path("experiments/study/results")
SEEDS = (0, 1, 2)
CONFIGURATIONS: dict[str, dict[str, str]] = {
    "base": {},
    "learning rate 1e-4": {"learner.learning_rate": "1e-4"},
    "learning rate 1e-3": {"learner.learning_rate": "1e-3"},
    "learning rate 3e-3": {"learner.learning_rate": "3e-3"},
    "lag 0": {"producer.max_policy_lag": "0"},
    "lag 8": {"producer.max_policy_lag": "8"},
    "weight cap 1": {"objective.tis_cap": "1.0"},
    "no centering": {"objective.centering": "off"},
    "groups of 4": {"rollout.group_size": "4", "rollout.tasks_per_update": "16"},
    "groups of 16": {"rollout.group_size": "16", "rollout.tasks_per_update": "4"},
}
COLUMNS = ("configuration", "seed", "score", "low", "high", "seconds", "tokens")


def planned() -> list[Planned]:
    names = [(name, settings, seed) for seed in SEEDS for name, settings in CONFIGURATIONS.items()]
    return [Planned(f"{name.replace(' ', '_')}_seed={seed}", name, settings, seed) for name, settings, seed in names]


def directory(model: str) -> Path:
    return Path(HOME) / f"{model}_runs"


def results(model: str) -> list[dict[str, str]]:
    """The scores that are kept, also where the runs themselves are gone."""
    file = RESULTS / f"{model}.csv"
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def missing() -> Iterator[tuple[str, Planned]]:
    """Whole seeds first, and of a seed the models in turn, so that a study that is stopped can be compared."""
    done = {model: {(r["configuration"], int(r["seed"])) for r in results(model)} for model in models.SIZES}
    for plan in planned():
        yield from ((model, plan) for model in models.SIZES if (plan.label, plan.seed) not in done[model])


def base_model(model: str) -> None:
    """Makes the model that every run begins with, where it is not there."""
    if (Path(HOME) / f"{model}_base" / "sft" / "config.json").is_file():
        return
    models.write_tasks(Path(HOME))
    models.write_random_model(Path(HOME) / f"{model}_random", model)
    if sft.main(["rlx sft", f"--config={RECIPE}:{model}_base"]):
        raise RuntimeError(f"the base model of {model} was not made")


def train_one(model: str, plan: Planned) -> None:
    """One run, and a line of its result. Runs of one process share what is compiled."""
    home = directory(model)
    sweep.write(home, [plan])
    own = [f"--config={RECIPE}:{model}", f"--config.run.directory={home}", f"--config.run.name={plan.run}"]
    before = cpu_seconds()
    summary = train(config_from_argv(["study", *own, *plan.changes], flags.FlagValues()))
    score, (low, high) = summary["eval/pass_rate_after"], summary["eval/interval_after"]
    tokens = summary["ledger"]["generated"][0]
    spent = cpu_seconds() - before
    row = (plan.label, plan.seed, score, round(low, 4), round(high, 4), round(spent, 1), tokens)
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{model}.csv"
    fresh = not file.is_file()
    with file.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerows(([COLUMNS] if fresh else []) + [row])


def cpu_seconds() -> float:
    """User and system time of this process and those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.study.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after so long")
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.seconds
    left = list(missing())
    for model in models.SIZES:
        base_model(model)
    with tqdm(left, desc="runs", file=sys.stderr) as bar:
        for number, (model, plan) in enumerate(bar):
            if number and time.monotonic() > until:
                break
            bar.set_postfix_str(f"{model}: {plan.run}")
            train_one(model, plan)
    print(f"{len(list(missing()))} of {len(planned()) * len(models.SIZES)} runs are left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
