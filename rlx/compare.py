"""Runs beside one another: every metric, the evaluations with their intervals, and what may be said of them.

rlx compare runs/target runs/proxy                    writes compare.html, .md, .json and .png to reports/
rlx compare runs/sweep --x=tokens --to=elsewhere      a directory of runs is all of its runs
rlx compare their-tensorboard wandb.csv --mapping=mapping.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from rlx import cli
from rlx.metrics.jsonl import encode
from rlx.proxy.charts import comparison
from rlx.proxy.foreign import read_mapping, read_runs
from rlx.proxy.runs import AXES, RunData

MOST_RUNS = 60


def read_all(paths: list[Path], mapping: Path | None) -> list[RunData]:
    """The runs of several places, with a progress bar on a terminal.

    Raises:
      ValueError: none, or more than a page can show.
    """
    mapped = read_mapping(mapping) if mapping else None
    bar = tqdm(paths, desc="reading", disable=not sys.stderr.isatty())
    runs = [run for path in bar for run in read_runs(path, mapped)]
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs: a comparison shows at most {MOST_RUNS}; name fewer")
    return runs


def main(argv: list[str] | None = None) -> int:
    """`rlx compare`: prints what may be said, as JSON with --json, and writes the report."""
    parser = argparse.ArgumentParser(
        prog="rlx compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="a run's directory, a directory of runs, or an export")
    parser.add_argument("--mapping", type=Path, metavar="FILE", help="how exports of another stack are read")
    parser.add_argument("--x", choices=AXES, default="updates", help="axis of the PNG; the page has all (updates)")
    parser.add_argument("--to", type=Path, default=Path("reports"), metavar="DIRECTORY", help="(reports)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    report = comparison(read_all(arguments.runs, arguments.mapping), arguments.x)
    written = report.write(arguments.to, "compare")
    print(encode(report.record) if arguments.json else "\n".join(report.lines))
    print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("compare", sys.argv[1:]))
