"""Runs for comparisons: directories as `rlx train` writes them, and exports of other stacks, without training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from rlx.metrics.jsonl import write_json
from rlx.metrics.statistics import wilson_interval

CONFIG = {
    "run": {"name": "", "seed": 0},
    "model": {"path": "models/small"},
    "learner": {"learning_rate": 1e-3, "updates": 20},
    "metrics": {"skip_updates": 1},
}


def write(directory: Path, name: str, *, updates: int = 20, rise: float = 0.5, seed: int = 0, **changes: Any) -> Path:
    """A run whose rewards rise by `rise`, with an evaluation of 80 attempts every 10 updates. `__` stands for the dot;
    missing=("group/name", ...) leaves metrics out."""
    path = directory / name
    path.mkdir(parents=True)
    missing = changes.pop("missing", ())
    config = json.loads(json.dumps(CONFIG)) | {"run": {"name": name, "seed": seed}}
    for key, value in changes.items():
        section, _, setting = key.partition("__")
        config[section][setting] = value
    write_json(path / "config.json", config)
    rng = np.random.default_rng([seed, len(name)])
    lines = [evaluation(0, 0.2)]
    for update in range(1, updates + 1):
        share = update / updates
        record = {
            "reward/mean": 0.2 + rise * share + 0.02 * rng.normal(),
            "offpolicy/kl_k3": 0.01 + 0.002 * rng.random(),
            "offpolicy/ess": 0.9 + 0.05 * rng.random(),
            "offpolicy/age_mean": 1.5 + 0.1 * rng.random(),
            "policy/entropy": 1.0 - 0.3 * share,
            "response/stop_reason_stop": 0.9,
            "ledger/groups_stale": float(update // 5),
            "ledger/groups_no_signal": float(update // 2),
            "ledger/tokens_generated": 1000.0 * update,
            "time/total_seconds": 2.0,
        }
        lines.append({"update": update, **{k: v for k, v in record.items() if k not in missing}})
        if update % 10 == 0:
            lines.append(evaluation(update, 0.2 + rise * share))
    write_jsonl(path / "metrics.jsonl", lines)
    write_json(path / "summary.json", {"updates": updates, "seconds": 2.5 * updates})
    return path


def evaluation(update: int, rate: float, attempts: int = 80) -> dict[str, Any]:
    passes = round(rate * attempts)
    low, high = wilson_interval(passes, attempts, 0.95)
    record = {"pass_rate": passes / attempts, "pass_rate_low": low, "pass_rate_high": high}
    record |= {"attempts": float(attempts), "tasks": 20.0}
    return {"update": update, "label": f"update {update}", **{f"eval/{k}": v for k, v in record.items()}}


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def sweep(directory: Path, model: str, quality: dict[float, float], seeds: int = 3) -> Path:
    """Runs of each learning rate, whose pass rates rise by `quality`, in `directory`."""
    for rate, rise in quality.items():
        for seed in range(seeds):
            spread = (seed - (seeds - 1) / 2) * 0.0125
            changes = {"learner__learning_rate": rate, "model__path": f"models/{model}"}
            write(directory, f"lr{rate}-{seed}", updates=10, rise=rise + spread, seed=seed, **changes)
    return directory
