"""What a cluster would do with a configuration, before there is one: `rlx simulate`.

    rlx simulate --config=configs/simulate_target.py [--json] [--png=FILE]
    rlx simulate --sweep sessions_in_flight=48,96,192 --sweep max_policy_lag=1,4,8
    rlx simulate --config=mine.py --fit=runs/mine --config.producer.sessions_in_flight=256

Runs the producer, fleet, buffer and publisher of `rlx train` on a virtual clock, against engines, sessions and a
trainer that are modelled as `config.simulate` says, or as the records of a run say. The same seed gives the same
answer. Without --config it simulates configs/simulate_target.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from rlx import cli
from rlx.config.axes import Axis, axis, grid
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.config.simulation import SimulateConfig
from rlx.simulation import fit
from rlx.simulation.result import Result
from rlx.simulation.run import check, simulate

TARGET = "configs/simulate_target.py"
COLUMNS = {  # of a sweep's table
    "update, min": lambda r: f"{r.update_minutes:.2f}",
    "wait share": lambda r: f"{r.trainer_wait_share:.1%}",
    "age mean": lambda r: f"{r.age_mean:.2f}",
    "age max": lambda r: str(r.age_max),
    "occupancy": lambda r: f"{r.engine_occupancy:.1%}",
    "session, min": lambda r: f"{r.session_minutes:.1f}",
    "stale": lambda r: f"{r.stale_share:.1%}",
    "no signal": lambda r: f"{r.no_signal_share:.1%}",
}


def own_flags() -> flags.FlagValues:
    own = flags.FlagValues()
    flags.DEFINE_boolean("json", False, "print JSON", flag_values=own)
    flags.DEFINE_multi_string(
        "sweep", [], "KEY=A,B,C: simulate each value, and every combination with further sweeps", flag_values=own
    )
    flags.DEFINE_string("fit", "", "RUN: take config.simulate from the records of a run's directory", flag_values=own)
    flags.DEFINE_string("png", "", "FILE: draw timeline and distributions, or the sweep", flag_values=own)
    return own


def main(argv: Sequence[str] | None = None) -> int:
    """`rlx simulate`: prints figures, a table or JSON."""
    argv = list(sys.argv if argv is None else argv)
    if not any(word.lstrip("-").partition("=")[0] in ("config", "help", "h") for word in argv[1:]):
        argv.insert(1, f"--config={TARGET}")
    own = own_flags()
    base = config_or_exit(argv, own, __doc__ or "", simulated=True)
    fitted = fit.from_run(Path(own["fit"].value), base) if own["fit"].value else None
    axes = [axis("--sweep", text) for text in own["sweep"].value or ()]
    if fitted is not None:
        refuse_fitted(argv, axes)
    # All are looked at before the first is simulated, which may take minutes.
    runs = list(swept(argv, base, axes, fitted))
    for _, config in runs:
        check(config)
    png = Path(own["png"].value) if own["png"].value else None
    if png:
        from rlx.simulation import figure  # matplotlib is not loaded for figures that nobody asked for

        figure.check(png)
    results = [(setting, simulate(config)) for setting, config in runs]
    if png:
        figure.write(png, results)
    if own["json"].value:
        rows = [({"settings": setting} if axes else {}) | result.to_json() for setting, result in results]
        print(json.dumps(rows if axes else rows[0]))
    elif axes:
        print("\n".join(table(results)))
    else:
        print("\n".join([*(fit.describe(fitted) if fitted else []), *results[0][1].lines()]))
    return 0


def refuse_fitted(argv: Sequence[str], axes: Sequence[Axis]) -> None:
    """Raises ConfigError for settings that a fit would replace without a word."""
    given = [word.lstrip("-").partition("=")[0].removeprefix("config.") for word in argv]
    wrong = [key for key in [*given, *(key for key, _ in axes)] if key.startswith("simulate.")]
    if wrong:
        raise ConfigError(
            *(f"config.{key}: --fit takes it from the records; leave out one of the two" for key in wrong)
        )


def swept(
    argv: Sequence[str], base: Config, axes: Sequence[Axis], fitted: SimulateConfig | None
) -> Iterator[tuple[dict[str, str], Config]]:
    """Every combination of the axes' values, the last axis fastest: what it sets, and the configuration."""
    for setting in grid(axes):
        changes = [f"--config.{key}={value}" for key, value in setting.items()]
        config = config_or_exit([*argv, *changes], own_flags(), "", simulated=True) if changes else base
        if fitted is not None:
            config = dataclasses.replace(config, simulate=fitted)
        yield setting, config


def table(results: Sequence[tuple[dict[str, str], Result]]) -> list[str]:
    """Markdown: a row for each combination."""
    settings = [key.rpartition(".")[2] for key in results[0][0]]
    rows: list[list[Any]] = [[*setting.values(), *(show(r) for show in COLUMNS.values())] for setting, r in results]
    cells = [[*settings, *COLUMNS], *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


if __name__ == "__main__":
    sys.exit(cli.run("simulate", sys.argv[1:]))
