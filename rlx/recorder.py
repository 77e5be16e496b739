"""Everything a run writes for people: JSONL records, TensorBoard events, the progress bar, the summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

from rlx.config.identity import flat
from rlx.config.parse import to_dict
from rlx.config.schema import Config
from rlx.interrupt import Preempted
from rlx.metrics.jsonl import encode, read_json, write_bytes, write_json
from rlx.metrics.names import check_names
from rlx.metrics.progress import Progress, Shown
from rlx.metrics.rundir import Records, RunDirectory
from rlx.metrics.shown import is_due, shown_samples
from rlx.metrics.tensorboard import TensorBoard, samples_table
from rlx.types import Group, Sample

Scores = Mapping[tuple[int, int], np.ndarray]  # (group, index) -> the trainer's log-probs of the written tokens


class Recorder:
    """Records of update u carry "update": u.

    A run that was restored, to update `restored`, goes on after the records that there were then; -1: it is fresh.
    """

    def __init__(self, config: Config, run: RunDirectory, restored: int, records: Records):
        self._config, self._run = config, run
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None  # the ledger, at most one at a time
        rewound = run.rewind(records)
        changes = [] if restored < 0 else changed_settings(read_json(run.config), to_dict(config))
        # They would be of an earlier end of this run.
        run.summary.unlink(missing_ok=True)
        run.stopped.unlink(missing_ok=True)
        write_json(run.config, to_dict(config))
        self._tensorboard = TensorBoard(run.events, restored, to_dict(config)) if config.metrics.tensorboard else None
        self.progress = Progress(config.learner.updates, max(restored, 0), config.metrics.skip_updates)
        if restored >= 0:
            self.progress.message(
                f"resumed after update {restored}; dropped {rewound.metrics} metric and {rewound.samples} sample "
                "records beyond it"
            )
        if changes:
            self.progress.message("this run went by other settings until here: " + "; ".join(changes))

    @property
    def records(self) -> Records:
        return self._run.records

    def update(
        self,
        update: int,
        scalars: Mapping[str, float],
        groups: Sequence[Group],
        arrays: Mapping[str, Sequence[float]],
        scores: Scores | None = None,
    ) -> None:
        """One update's metrics, its samples, and now and then histograms and sample texts.

        `scores`: of the samples that the trainer has scored before the update, under the policy it started from.
        """
        check_names(scalars)
        self._run.metrics.append({"update": update, **scalars})
        scores = scores or {}
        samples = [sample for group in groups for sample in group.samples]
        for sample in samples:
            record = sample_record(sample, scores.get((sample.group, sample.index)))
            self._run.samples.append({"update": update, "phase": "train", **record})
        if self._tensorboard is not None:
            self._events(self._tensorboard, update, scalars, groups, {**arrays, **_gaps(samples, scores)})
        self.progress.update(
            Shown(
                reward=scalars.get("reward/mean", math.nan),
                pass_rate=scalars.get("reward/pass_rate", math.nan),
                tokens_per_second=scalars.get("throughput/generated_tokens_per_second"),
                lag=scalars.get("offpolicy/age_mean", 0.0),
            )
        )

    def evaluation(self, label: str, update: int, scalars: Mapping[str, float], groups: Sequence[Group]) -> None:
        """`label`: base, before, after, or the update it was made at."""
        check_names(scalars)
        self._run.metrics.append({"update": update, "label": label, **scalars})
        for group in groups:
            for sample in group.samples:
                self._run.samples.append({"update": update, "phase": "eval", "label": label, **sample_record(sample)})
        if self._tensorboard is not None:
            self._tensorboard.scalars(scalars, update)
            self._tensorboard.text("eval/samples", self._table(groups), update)

    def sft(self, step: int, scalars: Mapping[str, float]) -> None:
        check_names(scalars)
        self._run.metrics.append({"update": 0, "step": step, **scalars})
        if self._tensorboard is not None:
            self._tensorboard.scalars(scalars, step)

    def ledger(self, state: Mapping[str, Any]) -> None:
        """The ledger's file becomes `state` soon: to wait for the disk would cost as much as all other records."""
        self._written()
        self._writing = self._thread.submit(write_bytes, self._run.ledger, (encode(state, indent=2) + "\n").encode())

    def _written(self) -> None:
        """The ledger's last state is on the disk. Raises what prevented it."""
        if self._writing is not None:
            self._writing.result()

    def summary(self, values: Mapping[str, Any]) -> None:
        write_json(self._run.summary, values)

    def sync(self) -> None:
        """Everything appended so far is on the disk."""
        self._written()
        self._run.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        self._thread.shutdown()
        if isinstance(error, Exception) and not isinstance(error, Preempted):  # who reads the run later sees no stderr
            write_json(self._run.stopped, {"kind": type(error).__name__, "reason": str(error)})
        if self._tensorboard is not None:
            self._tensorboard.close("success" if error is None else "failure")
        if error is None:
            self._written()

    def _events(
        self,
        board: TensorBoard,
        update: int,
        scalars: Mapping[str, float],
        groups: Sequence[Group],
        arrays: Mapping[str, Sequence[float]],
    ) -> None:
        metrics, last = self._config.metrics, self._config.learner.updates
        board.scalars(scalars, update)
        if is_due(update, metrics.histograms_every, last):
            for name, values in ((n, v) for n, v in arrays.items() if len(v)):
                board.histogram(name, np.asarray(values), update)
        if is_due(update, metrics.samples_every, last):
            board.text("response/samples", self._table(groups), update)

    def _table(self, groups: Sequence[Group]) -> str:
        table = samples_table(shown_samples(groups, self._config.metrics.samples_shown))
        return f"{table}\n\nEvery token of these, and more samples: `rlx show {self._run.path} --html`"


def _gaps(samples: Sequence[Sample], scores: Scores) -> dict[str, list[float]]:
    """What the trainer's log-probs differ by from the sampler's, over all scored tokens."""
    scored = [(s, scores[s.group, s.index]) for s in samples if (s.group, s.index) in scores]
    gaps = [values - sample.logprobs[sample.mask] for sample, values in scored]
    return {"offpolicy/logprob_gap": np.concatenate(gaps).tolist()} if gaps else {}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` of every setting that differs. `before` was read from a file."""
    old, new = flat(before), flat(now)
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]


def sample_record(sample: Sample, scored: np.ndarray | None = None) -> dict[str, Any]:
    """One line of samples.jsonl. Log-probs are those of the written tokens, `trainer_logprobs` where they are known."""
    written = np.flatnonzero(sample.mask)
    record = {
        "task": sample.task.id,
        "group": sample.group,
        "index": sample.index,
        "question": sample.task.question,
        "answer": sample.task.answer,
        "response": sample.text,
        "reward": sample.reward,
        "grade": dict(sample.grade),
        "stop_reason": sample.stop_reason.value,
        "prompt_tokens": int(written[0]) if len(written) else len(sample.tokens),
        "tokens": sample.tokens.tolist(),
        "logprobs": sample.logprobs[sample.mask].tolist(),
        "versions": [dataclasses.astuple(span) for span in sample.version_spans],
    }
    return record if scored is None else record | {"trainer_logprobs": scored.tolist()}
