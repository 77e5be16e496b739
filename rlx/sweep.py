"""A sweep: runs of one recipe over the values of some settings, each with several seeds, one run after the other.

rlx sweep --config=configs/quickstart.py --axis=learning_rate=1e-4,1e-3 --axis=max_policy_lag=0,4 --seeds=3
rlx sweep --config=... --axis=... --one_at_a_time      the recipe's own values, then each axis alone away from them

Runs go to RUN.DIRECTORY/RUN.NAME/, which `rlx compare`, `rlx agree` and `rlx tensorboard` (tab HPARAMS) read as a
whole. The same command again goes on where it was stopped; a run that is complete is not repeated, and one that was
made with other settings is refused.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from rlx import cli
from rlx.config.axes import axis, grid
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.identity import RUN, check_same, flat
from rlx.config.parse import to_dict
from rlx.config.schema import Config
from rlx.metrics.jsonl import read_json
from rlx.metrics.view import setting
from rlx.proxy import sweep
from rlx.proxy.sweep import Planned

LOG = "train.log"
# Beside `RUN`, what runs are compared by; timeouts and the like may change.
RECIPE = ("learner.", "objective.", "rollout.", "sft.", "producer.max_policy_lag", "producer.publication")


def own_flags() -> flags.FlagValues:
    own = flags.FlagValues()
    flags.DEFINE_multi_string("axis", [], "KEY=A,B,C: values of a setting; may be repeated", flag_values=own)
    flags.DEFINE_integer("seeds", 3, "runs of each configuration, run.seed = 0, 1, ...", flag_values=own)
    flags.DEFINE_boolean("one_at_a_time", False, "vary each axis alone instead of all together", flag_values=own)
    flags.DEFINE_boolean("dry_run", False, "print the runs and start none", flag_values=own)
    return own


def main(argv: Sequence[str] | None = None) -> int:
    """`rlx sweep`: 0 when every run is complete, 1 where some failed, 2 for a wrong configuration."""
    argv = list(sys.argv if argv is None else argv)
    own = own_flags()
    base = config_or_exit(argv, own, __doc__ or "")
    value: dict[str, Any] = own.flag_values_dict()
    axes = [axis("--axis", text) for text in value["axis"]]
    if not axes:
        raise ConfigError("--axis is missing: name a setting and its values, as in --axis=learning_rate=1e-4,1e-3")
    tree = to_dict(base)
    recipe = {key: str(setting(tree, key)) for key, _ in axes}
    points = sweep.one_at_a_time(axes, recipe) if value["one_at_a_time"] else grid(axes)
    planned = sweep.plan(points, range(value["seeds"]))
    words = recipe_words(argv)
    check_all(words, base.run.path, planned)
    if value["dry_run"]:
        print("\n".join(f"{p.run}: {' '.join(p.changes)}" for p in planned))
        return 0
    return run_all(words, base, planned)


def recipe_words(argv: Sequence[str]) -> list[str]:
    """The words that say the recipe and its changes, without the sweep's own."""
    return [word for word in argv[1:] if word.lstrip("-").startswith("config")]


def check_all(words: Sequence[str], directory: Path, planned: Sequence[Planned]) -> None:
    """Every configuration is checked before the first run starts: the last one must not fail after hours.

    Raises:
      ConfigError: a run that is there already was made with other settings: the sweep would compare it with the rest.
    """
    for p in planned:
        config = config_or_exit([f"rlx sweep: {p.label}", *words, *p.changes], flags.FlagValues(), "")
        written = directory / p.run / "config.json"
        if written.is_file():
            check_same(read_json(written), config, compared(config, p), str(written.parent))


def compared(config: Config, planned: Planned) -> list[str]:
    """Keys that no run of a sweep may change once it has begun; more updates are made by the run that is there."""
    recipe = [key for key in flat(to_dict(config)) if key.startswith(RECIPE) and key != "learner.updates"]
    return [*RUN, *recipe, *planned.settings]


def run_all(words: Sequence[str], base: Config, planned: Sequence[Planned]) -> int:
    """Trains every run in a process of its own; what one says goes to its train.log."""
    directory = base.run.path
    sweep.write(directory, planned)
    failed = []
    with tqdm(planned, desc="runs", file=sys.stderr) as bar:
        for p in bar:
            bar.set_postfix_str(p.run)
            if not train(words, directory, p):
                failed.append(p.run)
                tqdm.write(f"{p.run} failed; see {directory / p.run / LOG}", file=sys.stderr)
    print(f"{len(planned) - len(failed)} of {len(planned)} runs complete in {directory}: rlx compare {directory}")
    return 1 if failed else 0


def train(words: Sequence[str], directory: Path, planned: Planned) -> bool:
    """One run, which `rlx train` leaves as it is where it is complete; whether it is then."""
    path = directory / planned.run
    own = [f"--config.run.directory={directory}", f"--config.run.name={planned.run}"]
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOG).open("ab") as log:
        command = [sys.executable, "-m", "rlx.launch", "train", *words, *planned.changes, *own]
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(cli.run("sweep", sys.argv[1:]))
