"""TensorBoard's custom dashboard: chosen charts first, everything else folded."""

import re

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from rlx.metrics.layout import SUPERVISED, TRAINING, Band, Category, Lines, layout_summary
from rlx.metrics.names import GROUPS, METRICS


def layout(overview):
    [value] = layout_summary(overview, METRICS).value
    return layout_pb2.Layout.FromString(tensor_util.make_ndarray(value.tensor).item())


@pytest.mark.parametrize("overview", [TRAINING, SUPERVISED], ids=["training", "supervised"])
def test_the_overview_is_open_and_comes_first(overview):
    categories = layout(overview).category
    assert [c.title for c in categories[: len(overview)]] == [c.title for c in overview]
    assert [c.closed for c in categories] == [False] * len(overview) + [True] * len(GROUPS)


def test_every_scalar_is_below_it_once():
    folded = [c for c in layout(TRAINING).category if c.closed]
    assert [c.title for c in folded] == [f"all of {group}/" for group in GROUPS]
    tags = [tag for category in folded for chart in category.chart for tag in chart.multiline.tag]
    assert sorted(tags) == sorted(m.pattern for m in METRICS if m.kind == "scalar")
    kl = next(chart for category in folded for chart in category.chart if chart.title == "KL")
    assert list(kl.multiline.tag) == [f"^offpolicy/kl_{k}$" for k in ("k1", "k2", "k3")]
    for category in folded:
        titles = [chart.title for chart in category.chart]
        assert len(set(titles)) == len(titles)


def test_a_chart_matches_what_it_names_and_nothing_else():
    first = layout(TRAINING).category[0].chart
    lines = next(chart for chart in first if chart.title.startswith("pass rate of"))
    matching = [
        name
        for name in ("reward/pass_rate", "reward/pass_rate_sums", "reward/mean")
        if any(re.match(tag, name) for tag in lines.multiline.tag)
    ]
    assert matching == ["reward/pass_rate", "reward/pass_rate_sums"]
    [band] = next(chart for chart in first if chart.title.startswith("held-out")).margin.series
    assert (band.value, band.lower, band.upper) == ("eval/pass_rate", "eval/pass_rate_low", "eval/pass_rate_high")


@pytest.mark.parametrize("chart", [Lines("x", ("reward/men",)), Band("x", "eval/pass_rate", "a", "b")])
def test_a_chart_of_a_metric_that_does_not_exist_is_refused(chart):
    with pytest.raises(KeyError, match=r"does not list"):
        layout_summary([Category("x", (chart,))], METRICS)
