"""What lanes of the embedded engine and huge pages give on a CPU: whole steps of the peers' work, with and without.

    python -m bench.cpu_settings [--rounds 6] [--steps 3]

Each variant is a process of its own, as in bench/vs_peers.py; they take turns, and ratios are those of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

from bench.vs_peers import Side, running, steady, warm_up, write_model

VARIANTS = {
    "neither": (1, False),
    "huge pages": (1, True),
    "two lanes": (2, False),
    "both": (2, True),
}
WARM_UP = 4  # steps after the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of a variant in a round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = write_model(Path(directory))
        sides = {name: Side("rlx", model, "", lanes, huge) for name, (lanes, huge) in VARIANTS.items()}
        processes = {name: stack.enter_context(running(side)) for name, side in sides.items()}
        warm_up(processes, WARM_UP)
        before = {name: process.page_faults() for name, process in processes.items()}
        seconds = steady(processes, arguments.rounds, arguments.steps)
        steps = arguments.rounds * (1 + arguments.steps)  # with the one of each turn that `steady` does not time
        faults = {name: (process.page_faults() - before[name]) / steps for name, process in processes.items()}
    middles = {name: [statistics.median(turn) for turn in turns] for name, turns in seconds.items()}
    print("| | s a step | of a step with neither (rounds) | page faults a step |")
    print("|:--|--:|--:|--:|")
    for name, turns in middles.items():
        shares = [a / b for a, b in zip(turns, middles["neither"], strict=True)]
        print(
            f"| {name} | {statistics.median(turns):.3f} | {statistics.median(shares):.2f} "
            f"({min(shares):.2f} to {max(shares):.2f}) | {faults[name]:,.0f} |"
        )


if __name__ == "__main__":
    main()
