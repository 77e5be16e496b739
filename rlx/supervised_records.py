"""What a run of supervised steps writes for people: metrics.jsonl, TensorBoard events, a bar, the summary."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

from rlx.config.parse import to_dict
from rlx.config.schema import Config
from rlx.metrics.jsonl import write_json
from rlx.metrics.layout import SUPERVISED
from rlx.metrics.names import check_names
from rlx.metrics.rundir import Records, RunDirectory
from rlx.metrics.tensorboard import TensorBoard

EVERY_SECONDS = 30.0  # least time between two lines where stderr is no terminal and nothing was validated


class SupervisedRecorder:
    """Goes on after the `records` that there were when step `restored` was saved; 0: a fresh start."""

    def __init__(self, config: Config, run: RunDirectory, restored: int, records: Records):
        self._run, self._steps = run, config.sft.steps
        run.rewind(records)
        run.summary.unlink(missing_ok=True)
        write_json(run.config, to_dict(config))
        self._tensorboard = (
            TensorBoard(run.events, restored or -1, to_dict(config), SUPERVISED) if config.metrics.tensorboard else None
        )
        self._validation: float | None = None
        self._printed = -math.inf
        self._bar = tqdm(total=self._steps, initial=restored, desc="sft", dynamic_ncols=True, disable=None)

    @property
    def records(self) -> Records:
        return self._run.records

    def report(self, step: int, scalars: Mapping[str, float]) -> None:
        """One step's metrics; step 0 has the validation loss before the first."""
        check_names(scalars)
        self._run.metrics.append({"update": 0, "step": step, **scalars})
        if self._tensorboard is not None:
            self._tensorboard.scalars(scalars, step)
        self._validation = scalars.get("sft/validation_loss", self._validation)
        text = self._describe(scalars)
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(int(step > 0))
        elif self._is_due(step, scalars):
            print(f"step {step}/{self._steps}, {text}", file=sys.stderr, flush=True)
            self._printed = time.monotonic()

    def message(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def summary(self, values: Mapping[str, Any]) -> None:
        write_json(self._run.summary, values)

    def sync(self) -> None:
        """Everything appended so far is on the disk."""
        self._run.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def __enter__(self) -> SupervisedRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._tensorboard is not None:
            self._tensorboard.close("success" if error is None else "failure")

    def _describe(self, scalars: Mapping[str, float]) -> str:
        parts = [f"loss {scalars['sft/loss']:.3f}"] if "sft/loss" in scalars else []
        parts += [] if self._validation is None else [f"validation {self._validation:.3f}"]
        rate = scalars.get("sft/tokens_per_second")
        return ", ".join(parts if rate is None else [*parts, f"{tqdm.format_sizeof(rate)} tok/s"])

    def _is_due(self, step: int, scalars: Mapping[str, float]) -> bool:
        waited = time.monotonic() - self._printed
        return "sft/validation_loss" in scalars or step == self._steps or waited >= EVERY_SECONDS
