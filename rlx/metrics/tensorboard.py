"""TensorBoard event files, written by tensorboard itself: neither torch nor tensorflow is needed.

Scalars and histograms have the classic form (`simple_value`, `histo`): every reader of event files knows it, and
tensorboard's `EventAccumulator` drops the events beyond a resumed update from it alone. Texts exist as tensors only.

The custom dashboard's layout is `rlx.metrics.layout`; the hyperparameter dashboard shows the whole configuration beside
the last values of `OUTCOMES`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlx.metrics.layout import TRAINING, Category, layout_summary
from rlx.metrics.names import METRICS, find_metric
from rlx.types import Sample

Value = summary_pb2.Summary.Value
FLUSH_SECONDS = 10.0
PREFIX = "events.out.tfevents."
# The sections of the configuration that the hyperparameter dashboard has columns for.
COLUMNS = ("learner", "lora", "model", "objective", "rollout", "sft", "tasks")
# What the hyperparameter dashboard compares runs by: the last value of each.
OUTCOMES = (
    "eval/pass_rate",
    "reward/pass_rate",
    "reward/mean",
    "policy/entropy",
    "offpolicy/kl_k3",
    "offpolicy/ess",
    "response/length_mean",
    "throughput/generated_tokens_per_second",
    "ledger/trained_share",
    "sft/loss",
    "sft/validation_loss",
)


class TensorBoard:
    """Writes one run's events. A step is a policy version.

    Args:
      directory: made where it is missing.
      resume_after: the update that was restored, -1 for a fresh run. TensorBoard drops events of earlier files whose
        step is larger.
      config: nested configuration, shown flat as hyperparameters.
      overview: what the custom dashboard shows first.
    """

    def __init__(
        self,
        directory: Path,
        resume_after: int,
        config: Mapping[str, Any],
        overview: Sequence[Category] = TRAINING,
    ) -> None:
        _wait_for_a_later_name(directory)
        self._writer = EventFileWriter(str(directory), max_queue_size=1000, flush_secs=FLUSH_SECONDS)
        self._described: set[str] = set()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # START drops what is at its own step too, hence the next one.
        self._add(event_pb2.Event(step=resume_after + 1, session_log=start))
        self._summary(layout_summary(overview, METRICS), step=0)
        settings = flatten(config)
        self._summary(experiment_summary(settings), step=0)
        self._summary(
            hparams_pb(settings, trial_id=str(settings["run.name"]) if "run.name" in settings else None), step=0
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Writes numbers by metric name, float32."""
        rows = []
        for name, value in values.items():
            metadata = scalar_metadata.create_summary_metadata(name, self._describe(name))
            rows.append(Value(tag=name, simple_value=float(value), metadata=metadata))
        self._summary(summary_pb2.Summary(value=rows), step)

    def histogram(self, name: str, values: np.ndarray, step: int, buckets: int = 30) -> None:
        """Writes the distribution of an array of any shape.

        Raises:
          ValueError: where there is no value, or one that is not finite: it belongs in no bucket.
        """
        values = np.asarray(values, np.float64)
        bad = int((~np.isfinite(values)).sum())
        if not values.size:
            raise ValueError(f"histogram {name!r} has no values; leave it out where there is nothing to show")
        if bad:
            raise ValueError(f"histogram {name!r}: {bad} of {values.size} values are not finite; mask them first")
        metadata = histogram_metadata.create_summary_metadata(name, self._describe(name))
        row = Value(tag=name, histo=_histogram(values, buckets), metadata=metadata)
        self._summary(summary_pb2.Summary(value=[row]), step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Writes markdown."""
        self._summary(text_pb(name, markdown, self._describe(name)), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, status: Literal["success", "failure"] = "success") -> None:
        """Marks the end of the session for the hyperparameter dashboard and closes the file."""
        self._summary(_session_end(status), step=0)
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("success" if kind is None else "failure")

    def _describe(self, name: str) -> str:
        """The metric's meaning with a tag's first event; later ones would only repeat it."""
        metric = None if name in self._described else find_metric(name)
        self._described.add(name)
        return metric.description if metric else ""

    def _summary(self, summary: summary_pb2.Summary, step: int) -> None:
        self._add(event_pb2.Event(step=step, summary=summary))

    def _add(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)


def _wait_for_a_later_name(directory: Path) -> None:
    """Waits, at most a second, until a new file's name sorts after the others of this second.

    TensorBoard reads files by name, which begins with the second; what decides within one second is a process id, as
    text. A resumed run that is read before the run it resumes would keep the events that it should drop.
    """
    seconds = (path.name.removeprefix(PREFIX).partition(".")[0] for path in directory.glob(f"{PREFIX}*"))
    if max((int(text) for text in seconds if text.isdigit()), default=0) == int(time.time()):
        time.sleep(1.0 - time.time() % 1.0)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested mappings to dotted keys; a value that is no bool, number or text becomes its text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def write_sweep(directory: Path, runs: Sequence[Mapping[str, bool | int | float | str]]) -> None:
    """An event file beside those of several runs: the hyperparameter dashboard shows first what they differ in.

    `runs`: the flat settings of each.
    """
    shown = [name for name in runs[0] if name.partition(".")[0] in COLUMNS]
    differ = {name for name in shown if len({str(settings.get(name)) for settings in runs}) > 1}
    writer = EventFileWriter(str(directory))
    writer.add_event(event_pb2.Event(wall_time=time.time(), summary=experiment_summary(runs[0], differ)))
    writer.close()


def experiment_summary(
    settings: Mapping[str, bool | int | float | str], differ: Collection[str] = ()
) -> summary_pb2.Summary:
    """What the hyperparameter dashboard has columns for, those that `differ` first. Without it every scalar of a run
    would be one."""
    kinds = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(
                name=name, type=kinds.get(type(value), api_pb2.DATA_TYPE_FLOAT64), differs=name in differ
            )
            for name, value in settings.items()
            if name.partition(".")[0] in COLUMNS
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), description=_meaning(tag)) for tag in OUTCOMES
        ],
    )
    return _hparams_summary(hparams_metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment))


def _meaning(name: str) -> str:
    metric = find_metric(name)
    if metric is None:
        raise KeyError(f"{name!r} is no metric of rlx/metrics/names.py")
    return metric.description


def _histogram(values: np.ndarray, buckets: int) -> summary_pb2.HistogramProto:
    counts, edges = np.histogram(values, buckets)
    return summary_pb2.HistogramProto(
        min=values.min(),
        max=values.max(),
        num=values.size,
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket_limit=edges[1:],
        bucket=counts,
    )


def samples_table(samples: Sequence[Sample], characters: int = 600) -> str:
    """A markdown table of samples: task, question, response, reward, answer, how it ended. Long texts are cut."""
    lines = ["| task | question | response | reward | answer | ended by |", "|:--|:--|:--|--:|:--|:--|"]
    for sample in samples:
        task = sample.task
        texts = [_cell(text, characters) for text in (task.id, task.question, sample.text)]
        answer = "" if task.answer is None else _cell(task.answer, characters)
        lines.append(f"| {' | '.join(texts)} | {sample.reward:.3g} | {answer} | {sample.stop_reason.value} |")
    return "\n".join(lines)


def _cell(text: str, characters: int) -> str:
    """One line of markdown that shows `text` as it is."""
    if len(text) > characters:
        text = f"{text[:characters]} … ({len(text) - characters} more)"
    # `&` first: the others introduce it.
    for plain, shown in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(plain, shown)
    return text


def _session_end(status: Literal["success", "failure"]) -> summary_pb2.Summary:
    codes = {"success": api_pb2.STATUS_SUCCESS, "failure": api_pb2.STATUS_FAILURE}
    info = plugin_data_pb2.SessionEndInfo(status=codes[status], end_time_secs=math.floor(time.time()))
    return _hparams_summary(
        hparams_metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info)
    )


def _hparams_summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> summary_pb2.Summary:
    value = Value(
        tag=tag, metadata=hparams_metadata.create_summary_metadata(content), tensor=hparams_metadata.NULL_TENSOR
    )
    return summary_pb2.Summary(value=[value])
