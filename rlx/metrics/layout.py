"""TensorBoard's custom dashboard: the charts that answer a question first, then every other scalar by its group.

The overview's categories are open, the groups' are folded: nothing is lost, and what matters is on one page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.util import tensor_util

from rlx.metrics.names import GROUPS, Metric, find_metric


class Lines(NamedTuple):
    """Several metrics in one chart, by their names in the table; a placeholder stands for every name it matches."""

    title: str
    names: tuple[str, ...]


class Band(NamedTuple):
    """A metric with its interval."""

    title: str
    value: str
    low: str
    high: str


class Category(NamedTuple):
    title: str
    charts: tuple[Lines | Band, ...]


TRAINING: tuple[Category, ...] = (
    Category(
        "Is it learning?",
        (
            Lines("pass rate of the samples collected", ("reward/pass_rate", "reward/pass_rate_{source}")),
            Band(
                "held-out pass rate, with its interval", "eval/pass_rate", "eval/pass_rate_low", "eval/pass_rate_high"
            ),
            Lines("mean reward", ("reward/mean",)),
            Lines(
                "groups without signal",
                ("reward/no_signal_fraction", "reward/all_zero_fraction", "reward/all_one_fraction"),
            ),
        ),
    ),
    Category(
        "Do sampler and trainer agree?",
        (
            Lines("KL sampler to trainer, nats", ("offpolicy/kl_k2", "offpolicy/kl_k3")),
            Lines("effective sample size, fraction", ("offpolicy/ess",)),
            Lines("mean |log p - log q|, nats", ("offpolicy/logprob_gap_mean",)),
        ),
    ),
    Category(
        "Is the optimizer well?",
        (
            Lines("gradient norm", ("optimizer/grad_norm", "optimizer/grad_norm_clipped")),
            Lines("entropy, nats", ("policy/entropy",)),
            Lines("learning rate", ("optimizer/learning_rate",)),
        ),
    ),
    Category(
        "What was trained on?",
        (
            Lines("length, tokens", ("response/length_mean", "response/length_max")),
            Lines("how they ended, fraction", ("response/stop_reason_{reason}",)),
            Lines("age of the trained tokens, updates", ("offpolicy/age_mean", "offpolicy/age_max")),
        ),
    ),
    Category(
        "Where does the time go?",
        (
            Lines(
                "seconds by phase", tuple(f"time/{p}_seconds" for p in ("rollout", "update", "publish", "pack", "log"))
            ),
            Lines(
                "tokens a second", ("throughput/generated_tokens_per_second", "throughput/trained_tokens_per_second")
            ),
            Lines("share of the time without a batch", ("time/wait_share",)),
            Lines("memory, GiB", ("system/host_memory_gib", "system/device_memory_gib")),
        ),
    ),
    Category(
        "Where do the tokens go?",
        (
            Lines(
                "tokens by what became of them",
                tuple(
                    f"ledger/tokens_{b}" for b in ("generated", "trained", "no_signal", "stale", "masked", "evaluated")
                ),
            ),
            Lines("share that was trained on", ("ledger/trained_share",)),
        ),
    ),
)

SUPERVISED: tuple[Category, ...] = (
    Category(
        "Is it learning?",
        (
            Lines("loss, nats a token", ("sft/loss", "sft/validation_loss")),
            Lines("perplexity of the validation examples", ("sft/validation_perplexity",)),
        ),
    ),
    Category(
        "Is the optimizer well?",
        (Lines("gradient norm", ("sft/grad_norm",)), Lines("learning rate", ("sft/learning_rate",))),
    ),
    Category(
        "Where does the time go?",
        (
            Lines("tokens a second", ("sft/tokens_per_second",)),
            Lines("share of the packed positions that hold a token", ("sft/packing_fraction",)),
        ),
    ),
)


def layout_summary(overview: Sequence[Category], metrics: Iterable[Metric]) -> summary_pb2.Summary:
    """The dashboard as an event: `overview`, then a folded category for each group of the metric table.

    Raises:
      KeyError: for a chart of a metric that the table does not have.
    """
    categories = [layout_pb2.Category(title=c.title, chart=[_chart(x) for x in c.charts]) for c in overview]
    layout = layout_pb2.Layout(category=[*categories, *_groups(metrics)])
    value = summary_pb2.Summary.Value(
        tag=custom_scalar_metadata.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar_metadata.create_summary_metadata(),
        tensor=tensor_util.make_tensor_proto(layout.SerializeToString(), shape=()),
    )
    return summary_pb2.Summary(value=[value])


def _chart(chart: Lines | Band) -> layout_pb2.Chart:
    if isinstance(chart, Lines):
        tags = [_row(name).pattern for name in chart.names]
        return layout_pb2.Chart(title=chart.title, multiline=layout_pb2.MultilineChartContent(tag=tags))
    series = layout_pb2.MarginChartContent.Series(
        value=_row(chart.value).name, lower=_row(chart.low).name, upper=_row(chart.high).name
    )
    return layout_pb2.Chart(title=chart.title, margin=layout_pb2.MarginChartContent(series=[series]))


def _row(name: str) -> Metric:
    metric = find_metric(re.sub(r"\{[a-z_]+\}", "any", name))
    if metric is None:
        raise KeyError(f"the dashboard charts {name!r}, which rlx/metrics/names.py does not list")
    return metric


def _groups(metrics: Iterable[Metric]) -> list[layout_pb2.Category]:
    """Categories in the order of `GROUPS`, charts in the order of the table."""
    charts: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    for metric in metrics:
        if metric.kind == "scalar":
            title = metric.chart or metric.name.partition("/")[2]
            charts[metric.group].setdefault(title, []).append(metric.pattern)
    return [
        layout_pb2.Category(
            title=f"all of {group}/",
            closed=True,
            chart=[
                layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=patterns))
                for title, patterns in group_charts.items()
            ],
        )
        for group, group_charts in charts.items()
        if group_charts
    ]
