"""Compile time of a tiny model's update: by its number of layers, which are scanned, and by devices.

    python bench/compile_time.py --rounds=3

CPU seconds of tracing, lowering and compiling both programs of an update, for abstract arrays; a round compiles every
case once, in turn, so that ratios are of neighbours in time. The first round is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
from absl import flags

from rlx.config.flags import config_from_argv
from rlx.models.hf_config import read_config
from rlx.parallel.layout import parse_layout
from rlx.planning.case import Case, case_of
from rlx.planning.compiled import accounts

FEW, MANY = 4, 32  # layers
LAYOUT = "TP4 PP3 CP2"  # 24 devices
ROWS, TOKENS = 8, 128


def case(layers: int, layout: str) -> Case:
    words = ["plan", "--config=configs/tiny_dense.py"]
    config = config_from_argv(words, flags.FlagValues(), simulated=True)
    arch = read_config(config.model.path)
    arch = dataclasses.replace(arch, groups=tuple(dataclasses.replace(g, repeats=layers) for g in arch.groups))
    made = case_of(config, arch)
    return dataclasses.replace(
        made, layout=parse_layout(layout), remat="layer", rows=ROWS, tokens=TOKENS, targets=TOKENS
    ).checked()


def seconds(each: Case) -> float:
    jax.clear_caches()
    start = time.process_time()
    accounts(each)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    cases = {
        f"{FEW} layers, 1 device": case(FEW, "TP1"),
        f"{MANY} layers, 1 device": case(MANY, "TP1"),
        f"{FEW} layers, {LAYOUT}": case(FEW, LAYOUT),
    }
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", parse_layout(LAYOUT).devices)
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 1):
        for name, each in cases.items():
            took = seconds(each)
            if i:
                spent[name].append(took)
    first = next(iter(spent.values()))
    for name, each_took in spent.items():
        ratio = statistics.median(a / b for a, b in zip(each_took, first, strict=True))
        print(f"{name:<24}{statistics.median(each_took):>8.2f} CPU s{ratio:>8.2f} x")


if __name__ == "__main__":
    main()
