"""Two configurations side by side: what must change with the model, what to search again, what must stay, and why.

rlx diff configs/k31_target.py configs/qwen36_35b_proxy.py:final
rlx diff runs/target runs/proxy --to=reports --json         runs have their settings, too

Parameters and their trainable share are counted from the model's description. The exit status is 3 where the algorithm
differs, as then nothing that is learned from the one carries over to the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx import cli
from rlx.config import recipe
from rlx.config.parse import parse, to_dict
from rlx.config.schema import Config
from rlx.metrics.jsonl import encode, read_json
from rlx.planning.counts import count
from rlx.proxy.diff import Side, report

EXIT_OTHER_ALGORITHM = 3


def read_side(name: str) -> Side:
    """A recipe, `configs/base.py:variant`, or a run's directory.

    Raises:
      ConfigError: no such recipe, or one with a wrong key.
    """
    if (Path(name) / "config.json").is_file():
        return Side(Path(name).name, read_json(Path(name) / "config.json"))
    config = parse(recipe.load(name))
    return counted(name, config)


def counted(name: str, config: Config) -> Side:
    """With its parameters, where the model's description is there."""
    label = Path(name.partition(":")[0]).stem + "".join(name.partition(":")[1:])
    tree: Mapping[str, Any] = to_dict(config)
    try:
        found = count(config)
    except (OSError, ValueError) as error:
        return Side(label, tree, uncounted=str(error))
    return Side(label, tree, found.total_parameters, found.trainable_parameters)


def main(argv: list[str] | None = None) -> int:
    """`rlx diff`: prints the tables as Markdown, or JSON."""
    parser = argparse.ArgumentParser(
        prog="rlx diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", help="a recipe, its variant behind a colon, or a run's directory")
    parser.add_argument("second", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON: every key with its kind and reason")
    parser.add_argument("--to", type=Path, metavar="DIRECTORY", help="write diff.json, .md and .html there")
    arguments = parser.parse_args(argv)
    found = report(read_side(arguments.first), read_side(arguments.second))
    if arguments.to is not None:
        written = found.write(arguments.to, "diff")
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr)
    print(encode(found.record) if arguments.json else found.markdown(), end="\n" if arguments.json else "")
    return EXIT_OTHER_ALGORITHM if found.record["algorithm_differs_in"] else 0


if __name__ == "__main__":
    sys.exit(cli.run("diff", sys.argv[1:]))
