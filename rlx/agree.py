"""Does a proxy rank configurations as the target does? Kendall's tau, Spearman and pairs, with intervals over seeds.

rlx agree runs/target-sweep runs/proxy-sweep
rlx agree target.csv proxy.csv --json                  tables with the columns configuration, seed, score
rlx agree wandb-export.csv runs/proxy --mapping=mapping.json --to=reports

Each side is a directory of runs, such as `rlx sweep` makes, TensorBoard folders, or a CSV or JSONL export. Runs whose
settings are the same but for the seed are one configuration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from rlx import cli
from rlx.metrics.jsonl import encode
from rlx.proxy import ranking
from rlx.proxy.agreement import agree, agree_over_tasks
from rlx.proxy.foreign import read_mapping


def main(argv: list[str] | None = None) -> int:
    """`rlx agree`: prints what was found, as JSON with --json; 1 where the runs cannot be compared."""
    arguments = _parser().parse_args(argv)
    mapping = read_mapping(arguments.mapping) if arguments.mapping else None
    how = (mapping, arguments.metric, arguments.lower_is_better)
    both = (arguments.target, arguments.proxy)
    target, proxy = (ranking.read_study(path, *how, by_task=arguments.over_tasks) for path in both)
    first, second, others = ranking.common(target, proxy)
    options = {"bootstrap": arguments.bootstrap, "seed": arguments.seed, "confidence": arguments.confidence}
    if arguments.over_tasks:
        tasks = [{name: np.array(of.by_task[name]) for name in first} for of in (target, proxy)]
        found = agree_over_tasks(*tasks, **options)
    else:
        found = agree(first, second, **options)
    report = ranking.report(found, target, proxy, others)
    if arguments.to is not None:
        written = report.write(arguments.to, "agree")
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    print(encode(report.record) if arguments.json else report.markdown(), end="\n" if arguments.json else "")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlx agree", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the target's runs")
    parser.add_argument("proxy", type=Path, help="the proxy's runs")
    parser.add_argument(
        "--metric", default=ranking.PASS_RATE, help=f"what is ranked by ({ranking.PASS_RATE}, the last)"
    )
    parser.add_argument("--lower-is-better", action="store_true", help="of a loss, for instance")
    parser.add_argument(
        "--over-tasks", action="store_true", help="intervals also over held-out tasks, from the runs' samples.jsonl"
    )
    parser.add_argument("--mapping", type=Path, metavar="FILE", help="how exports of another stack are read")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument("--bootstrap", type=int, default=2000, help="resamples of the seeds (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--to", type=Path, metavar="DIRECTORY", help="write agree.json, .md, .html and .png there")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run("agree", sys.argv[1:]))
