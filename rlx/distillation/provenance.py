"""Where a signal comes from and what it cost, read from the run that trained its expert."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.metrics.jsonl import read_json, read_jsonl

THIRDS = 3
SIGNIFICANT = 2.0  # standard errors
SUMMARY_KEYS = ("updates", "eval/pass_rate_before", "eval/pass_rate_after", "seconds", "ledger", "policy")
CONFIG_KEYS = ("tasks", "objective", "model")


class Origin(NamedTuple):
    base: str  # model that the run began with
    expert: str  # what it has written
    provenance: dict[str, Any]
    cost: dict[str, float]


def read_origin(run: Path) -> Origin:
    """Of a run that came to its end.

    Raises FileNotFoundError for one that did not, ValueError for one that is not of `rlx train`, or damaged.
    """
    summary_file = run / "summary.json"
    if not summary_file.is_file():
        raise FileNotFoundError(f"{summary_file} is missing: a signal is made of a run that came to its end")
    summary, config = _read(summary_file, SUMMARY_KEYS), _read(run / "config.json", CONFIG_KEYS)
    records, _ = read_jsonl(run / "metrics.jsonl")
    rewards = [r["reward/mean"] for r in records if "reward/mean" in r]
    sources = config["tasks"]["sources"]
    provenance = {
        "run": str(run),
        "tasks": {name: source["dataset"] or source["path"] for name, source in sources.items()},
        "updates": summary["updates"],
        "reward_before": summary["eval/pass_rate_before"],
        "reward_after": summary["eval/pass_rate_after"],
        "converged": converged(rewards),
        "objective": described(config["objective"]),
    }
    cost = {
        "seconds": summary["seconds"],
        "generated_tokens": float(summary["ledger"]["generated"][0]),
        "trained_tokens": float(sum(r.get("batch/tokens", 0.0) for r in records)),
    }
    return Origin(config["model"]["path"], summary["policy"], provenance, cost)


def _read(file: Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        content = read_json(file)
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged, it is not JSON ({error}): remove it and run `rlx train` again, which continues from "
            "the last checkpoint; or name --base and --expert instead of --run"
        ) from error
    lacks = [key for key in keys if not isinstance(content, dict) or key not in content]
    if lacks:
        raise ValueError(f"{file} has no {lacks[0]!r}: --run takes a run of `rlx train`; else name --base and --expert")
    return content


def described(objective: dict[str, Any]) -> str:
    """RL by its loss, or a transfer: a chain of signals says so at every hop."""
    distill = objective["distill"]
    if distill["form"] == "off":
        return f"{objective['advantage']}, {objective['loss']}"
    return f"{distill['signal']} distillation, lambda {distill['lam']}"


def converged(rewards: Sequence[float]) -> bool | None:
    """No longer rising: the last third of the updates is not significantly above the third before it.

    Rewards of single updates are compared, as if independent; None, not known, of a run with fewer than 9 updates.
    """
    size = len(rewards) // THIRDS
    if size < THIRDS:
        return None
    middle, last = np.array(rewards[-2 * size : -size]), np.array(rewards[-size:])
    error = math.sqrt(middle.var(ddof=1) / size + last.var(ddof=1) / size)
    return bool(last.mean() - middle.mean() <= SIGNIFICANT * error)
