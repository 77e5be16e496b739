"""A sweep: configurations over one axis or more, each with several seeds, as runs with names of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.config.axes import Axis
from rlx.metrics.jsonl import read_json, write_json
from rlx.proxy.ranking import label
from rlx.proxy.runs import SWEEP


class Planned(NamedTuple):
    """One run of a sweep."""

    run: str  # its name
    label: str  # of its configuration
    settings: Mapping[str, str]
    seed: int

    @property
    def changes(self) -> list[str]:
        """As words of a command line."""
        return [f"--config.{key}={value}" for key, value in {**self.settings, "run.seed": self.seed}.items()]


def one_at_a_time(axes: Sequence[Axis], base: Mapping[str, str]) -> list[dict[str, str]]:
    """The base's values, then each axis alone away from them. `base` has a value for every axis."""
    points = [dict(base)]
    points += [dict(base) | {key: value} for key, values in axes for value in values]
    return [dict(point) for point in dict.fromkeys(tuple(point.items()) for point in points)]


def plan(points: Sequence[Mapping[str, str]], seeds: Sequence[int]) -> list[Planned]:
    """Every point with every seed, all points of the first seed first: a sweep that is stopped has whole seeds.

    Raises:
      ValueError: no points or seeds, or two points of one name.
    """
    if not points or not seeds:
        raise ValueError("a sweep needs at least one configuration and one seed")
    planned = [Planned(_name(label(p), seed), label(p), p, seed) for seed in seeds for p in points]
    names = [p.run for p in planned]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two configurations of the sweep are called {twice!r}; leave one of them out")
    return planned


def write(directory: Path, planned: Sequence[Planned]) -> None:
    """sweep.json, from which `rlx agree` knows which run is which configuration. Runs listed before stay listed."""
    rows: dict[str, Any] = {}
    if (directory / SWEEP).is_file():
        rows = {row["run"]: row for row in read_json(directory / SWEEP)["runs"]}
    rows |= {p.run: p._asdict() for p in planned}
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / SWEEP, {"runs": list(rows.values())})


def _name(of: str, seed: int) -> str:
    return re.sub(r"[^\w.=+-]+", "_", f"{of}_seed={seed}")
