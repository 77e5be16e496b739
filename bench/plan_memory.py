"""Bytes of a device as `rlx plan` has them beside XLA's own account of the compiled update, by layout.

    python bench/plan_memory.py                     1, 2, 4, 8 devices on each axis, of experts too
    python bench/plan_memory.py --fit               the weights of `rlx.planning.estimate`, from other layouts
    python bench/plan_memory.py --kind=moe --layouts="DP2 EP2;TP2 DP2 EP4"

Nothing runs: programs are compiled for virtual devices of this CPU, and allocate nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import flags
from scipy.optimize import nnls

from rlx.config.flags import config_from_argv
from rlx.models.hf_config import read_config
from rlx.models.transformer import Remat
from rlx.parallel.layout import parse_layout
from rlx.planning.case import Case, case_of
from rlx.planning.compiled import Account, accounts
from rlx.planning.estimate import arguments, outputs, weighted
from rlx.planning.memory import Temporaries, temporaries

ROWS, TOKENS, REPEATS = 8, 512, 8
# (kind, layout) of the table. Experts lie over another axis, here that of rows.
AXES = (
    ("dense", "TP1"),
    *(("dense", f"{axis}{n}") for axis in ("TP", "PP", "CP", "DP") for n in (2, 4, 8)),
    ("moe", "TP1"),
    *(("moe", f"DP{n} EP{n}") for n in (2, 4, 8)),
)
# (kind, rank, remat, layout): none of them is in the table that is printed.
FIT: tuple[tuple[str, int, Remat, str], ...] = (
    ("dense", 4, "layer", "TP2 CP2"),
    ("dense", 4, "layer", "PP2 DP2"),
    ("dense", 0, "layer", "TP2 DP2"),
    ("dense", 0, "products", "DP2 CP2"),
    ("dense", 4, "none", "DP2 CP4"),
    ("dense", 4, "none", "TP2 PP2"),
    ("moe", 4, "layer", "TP2 DP2 EP2"),
    ("moe", 4, "layer", "DP4 CP2 EP4"),
    ("moe", 4, "layer", "CP2 DP2"),
    ("mla", 4, "layer", "TP2 CP2 DP2"),
    ("hybrid", 4, "layer", "TP2 DP2"),
    ("k3", 4, "layer", "DP2 CP2"),
)


def case(kind: str, rank: int, remat: Remat, layout: str, tokens: int = TOKENS, keys: tuple[str, ...] = ()) -> Case:
    """A tiny model of that kind with its pattern repeated so often that 8 stages have a layer each."""
    words = ["plan", f"--config=configs/tiny_{kind}.py", f"--config.lora.rank={rank}", *keys]
    config = config_from_argv(words, flags.FlagValues(), simulated=True)
    arch = read_config(config.model.path)
    groups = tuple(dataclasses.replace(g, repeats=REPEATS) if g.repeats > 1 else g for g in arch.groups)
    made = case_of(config, dataclasses.replace(arch, groups=groups))
    return dataclasses.replace(
        made, layout=parse_layout(layout), remat=remat, rows=ROWS, tokens=tokens, targets=tokens
    ).checked()


def compared(cases: list[Case]) -> Iterator[tuple[Case, Account]]:
    for each in cases:
        yield each, accounts(each).gradient


def as_json(cases: list[Case]) -> None:
    for each, account in compared(cases):
        fields = ("planned_arguments", "planned_outputs", "planned_temporaries")
        said = dict(zip(fields, planned(each), strict=True))
        names = {"kind": _kind(each), "layout": str(each.layout)}
        print(json.dumps(names | account._asdict() | said), flush=True)


def _kind(each: Case) -> str:
    return Path(each.config.model.path).name.removeprefix("tiny_")


def planned(each: Case) -> tuple[int, int, float]:
    return arguments(each), outputs(each), sum(weighted(temporaries(each, accelerator=False)))


def table(cases: list[Case]) -> None:
    """MiB of XLA's account / of the plan, and how far off the plan is."""
    print(f"{'layout':<30}" + "".join(f"{name:>28}" for name in Account._fields))
    for each, account in compared(cases):
        shown = [
            f"{x / 2**20:.3f} / {y / 2**20:.3f} {y / x - 1:+.1%}" for x, y in zip(account, planned(each), strict=True)
        ]
        print(f"{_kind(each):<6}{each.layout!s:<24}" + "".join(f"{text:>28}" for text in shown), flush=True)


def fit(cases: list[Case]) -> None:
    """Least squares of relative errors, no weight negative."""
    rows, sizes = [], []
    for each, account in compared(cases):
        made = temporaries(each, accelerator=False)
        print(json.dumps({"layout": str(each.layout), "temporaries": account.temporaries} | made._asdict()), flush=True)
        rows.append(np.asarray(made) / account.temporaries)
        sizes.append(1.0)
    found, rest = nnls(np.asarray(rows), np.asarray(sizes))
    print(
        {name: round(float(w), 3) for name, w in zip(Temporaries._fields, found, strict=True)}, f"residual {rest:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each layout")
    parser.add_argument("--kind", default="dense", help="of --layouts")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--remat", default="layer", choices=("none", "products", "layer"))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a row; long ones attend by blocks")
    parser.add_argument("--ring", action="store_true", help="keys and values go round over CP")
    parser.add_argument("--layouts", help="separated by ;, in place of the table's")
    parser.add_argument("--whole-streams", action="store_true", help="cluster.sequence_parallel = False")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if given.fit:
        fit([case(*each) for each in FIT])
    else:
        show = as_json if given.json else table
        keys: tuple[str, ...] = ("--config.cluster.context_parallel=ring",) if given.ring else ()
        keys += ("--config.cluster.sequence_parallel=False",) if given.whole_streams else ()
        asked = [(given.kind, layout) for layout in given.layouts.split(";")] if given.layouts else AXES
        show([case(kind, given.rank, given.remat, layout, given.tokens, keys) for kind, layout in asked])


if __name__ == "__main__":
    main()
