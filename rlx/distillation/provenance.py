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


class Origin(NamedTuple):
    base: str  # model that the run began with
    expert: str  # what it has written
    provenance: dict[str, Any]
    cost: dict[str, float]


def read_origin(run: Path) -> Origin:
    """Of a run that came to its end. Raises FileNotFoundError for one that did not."""
    summary_file = run / "summary.json"
    if not summary_file.is_file():
        raise FileNotFoundError(f"{summary_file} is missing: a signal is made of a run that came to its end")
    summary, config = read_json(summary_file), read_json(run / "config.json")
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


def described(objective: dict[str, Any]) -> str:
    """RL by its loss, or a transfer: a chain of signals says so at every hop."""
    distill = objective["distill"]
    if distill["form"] == "off":
        return f"{objective['advantage']}, {objective['loss']}"
    return f"{distill['signal']} distillation, lambda {distill['lam']}"


def converged(rewards: Sequence[float]) -> bool:
    """No longer rising: the last third of the updates is not significantly above the third before it.

    Rewards of single updates are compared, as if independent; of a run with fewer than 9 updates nothing is said.
    """
    size = len(rewards) // THIRDS
    if size < THIRDS:
        return False
    middle, last = np.array(rewards[-2 * size : -size]), np.array(rewards[-size:])
    error = math.sqrt(middle.var(ddof=1) / size + last.var(ddof=1) / size)
    return bool(last.mean() - middle.mean() <= SIGNIFICANT * error)
