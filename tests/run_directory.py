"""A run's directory with records of a few updates, as a recorder writes them, without a model or a loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from rlx.metrics.ledger import Ledger
from rlx.metrics.rundir import Records, open_run
from rlx.recorder import Recorder
from rlx.types import Group
from tests import records, tiny_run

UPDATES = 4


def group(number: int, rewards: tuple[float, ...], text: str = "7") -> Group:
    """Samples of 8 prompt and 4 written tokens of the tiny tokenizer's, the byte `text` at most of them."""
    made = records.make_group(rewards, group=number, prompt=8, written=4)
    samples = tuple(
        dataclasses.replace(s, text=text, tokens=np.full(12, 26, np.int32), grade={**s.grade, "extracted": text})
        for s in made.samples
    )
    return Group(made.task, samples)


def write(recipe: Path, updates: int = UPDATES, *, end: bool = True, text: str = "7", **changes: Any) -> Path:
    """Runs of `recipe` (see `tiny_run`) get one whose pass rate goes from 0 to 1; samples of update 2 are scored."""
    config = tiny_run.config(recipe, learner__updates=UPDATES, **changes)
    ledger = Ledger()
    with open_run(config.run.path, "auto") as run, Recorder(config, run, -1, Records(0, 0)) as recorder:
        recorder.evaluation("base", 0, evaluation(0.0), [group(0, (0.0, 0.0), text)])
        for update in range(1, updates + 1):
            rewards = (update / UPDATES, 0.0)
            groups = [group(update, rewards, text), group(100 + update, (0.0, 0.0), text)]
            scores = {(update, i): np.array([-0.5, -0.4, -0.7, -3.0], np.float32) for i in range(2)}
            ledger.generated(16, 4, 2)
            ledger.move("in_flight", "buffered", 16, 4, 2)
            ledger.move("buffered", "trained", 16, 4, 2)
            scalars = {"reward/mean": np.mean(rewards), "reward/pass_rate": update / UPDATES, "policy/entropy": 1.5}
            recorder.update(update, scalars, groups, {"response/length": [4, 4]}, scores if update == 2 else {})
        recorder.ledger(ledger.get_state())
        if end:
            recorder.evaluation("after", updates, evaluation(0.75), [group(0, (1.0, 0.0), text)])
            recorder.summary({"updates": updates, "seconds": 90.0, "peak_memory_gib": 1.5, "policy": "adapter"})
    (config.run.path / "lock").write_text("")  # the process that wrote it is this one
    return config.run.path


def evaluation(rate: float) -> dict[str, float]:
    return {
        "eval/pass_rate": rate,
        "eval/pass_rate_low": max(rate - 0.2, 0.0),
        "eval/pass_rate_high": min(rate + 0.2, 1.0),
        "eval/attempts": 20.0,
    }
