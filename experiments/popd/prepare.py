"""The transfer study's models: three bases by supervised steps, experts by RL of the two smaller, a signal of each.

python -m experiments.popd.prepare [--seeds=1]     makes what is missing, and may be stopped and started again
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from absl import flags

from configs.rl import HOME
from experiments.popd import models
from rlx import sft, signal
from rlx.config.flags import config_from_argv
from rlx.train import train

RECIPE = "experiments/popd/recipe.py"
PROXIES = ("mid", "small")
TARGET = "target"


def base_model(name: str) -> Path:
    """The model that every run of this size begins with."""
    made = Path(HOME) / f"{name}_base" / "sft"
    if not (made / "config.json").is_file():
        if not (Path(HOME) / "tasks.jsonl").is_file():
            models.write_tasks(Path(HOME))
        models.write_random_model(Path(HOME) / f"{name}_random", name)
        if sft.main(["rlx sft", f"--config={RECIPE}:{name}_base"]):
            raise RuntimeError(f"the base model of {name} was not made")
    return made


def expert(name: str, seed: int, updates: int | None = None) -> Path:
    """The run that made an expert of a base by RL; `updates`: an older one, which has not converged."""
    base_model(name)
    run = Path(HOME) / (f"{name}_expert_seed={seed}" if updates is None else f"{name}_expert_{updates}_seed={seed}")
    if not (run / "summary.json").is_file():
        words = [f"--config={RECIPE}:{name}", f"--config.run.name={run.name}", f"--config.run.seed={seed}"]
        words += [] if updates is None else [f"--config.learner.updates={updates}"]
        train(config_from_argv(["prepare", *words], flags.FlagValues()))
    return run


def make_signal(name: str, base: Path, run: Path) -> Path:
    """The signal of a run that began at `base`."""
    to = Path(HOME) / "signals" / name
    if not (to / "signal.json").is_file():
        signal.create(to, str(base), str(run / "model"), run=run)
    return to


def proxy_signal(name: str, seed: int) -> Path:
    return make_signal(f"{name}_seed={seed}", base_model(name), expert(name, seed))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.popd.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="experts of each proxy")
    arguments = parser.parse_args(argv)
    base_model(TARGET)
    for name in PROXIES:
        for seed in range(arguments.seeds):
            made = proxy_signal(name, seed)
            found = json.loads((made / "signal.json").read_text(encoding="utf-8"))["provenance"]
            print(f"{made}: reward {found['reward_before']:.3f} -> {found['reward_after']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
