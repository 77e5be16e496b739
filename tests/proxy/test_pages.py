"""A comparison's page and TensorBoard's view of a sweep as a browser shows them."""

from pathlib import Path

import pytest

from docs.screenshots import dashboard, hparams, opened, report_page, started
from rlx.proxy.charts import comparison
from rlx.proxy.foreign import read_runs
from rlx.proxy.report import Report, Table
from tests import browser as browser_tests
from tests import run_directory, tiny_run
from tests.proxy import made_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    browser_tests.require()
    with started() as browser:
        yield browser


def page_of(directory: Path) -> Path:
    comparison(read_runs(directory)).write(directory, "compare")
    return directory / "compare.html"


@pytest.fixture(scope="module")
def two(browser, tmp_path_factory):
    """A target of 20 updates and a proxy of 12 that lacks two metrics."""
    directory = tmp_path_factory.mktemp("two")
    made_runs.write(directory, "a_target", model__path="models/large")
    made_runs.write(directory, "b_proxy", updates=12, rise=0.3, missing=("policy/entropy", "offpolicy/kl_k3"))
    with report_page(browser, page_of(directory)) as tab:
        yield tab


def test_the_page_draws_every_metric_that_there_is_and_loads_nothing(two):
    page = two.page
    assert page.title() == "2 runs of 2 models"
    titles = page.locator(".chart b").all_inner_texts()
    assert titles[:2] == ["held-out pass rate, with its interval", "training reward"]
    assert "entropy" in titles
    lines = page.locator(".chart", has=page.get_by_text("entropy", exact=True)).locator("path.line")
    assert lines.count() == 1
    assert page.locator(".chart").first.locator("path.line").count() == 2
    assert page.locator(".chart").first.locator("circle").count() == 5, "evaluations, each with its interval"
    assert "a_target (large) learns; training reward rises" in page.locator("ul.lines").inner_text()
    assert two.errors == []


def test_the_axis_is_the_reader_s(two):
    page = two.page
    first = page.locator(".chart").nth(1)
    before = first.locator("path.line").nth(1).get_attribute("d")
    page.select_option("#axis", label="tokens")
    assert first.locator("path.line").nth(1).get_attribute("d") != ""
    assert "20k" in first.inner_text()
    page.select_option("#axis", label="updates")
    assert first.locator("path.line").nth(1).get_attribute("d") == before


def test_a_run_can_be_hidden_and_a_point_says_what_it_is(two):
    page = two.page
    box = page.locator("#runs input").first
    box.uncheck()
    assert page.locator(".chart").first.locator("path.line").count() == 1
    box.check()
    page.locator(".chart").first.locator("circle").nth(1).hover(force=True)
    said = page.locator("#tip").inner_text()
    assert "[" in said, "a sampled rate has its interval"
    assert "at updates" in said


def test_sixty_runs_are_still_a_page(browser, tmp_path):
    for i in range(60):
        missing = ("reward/mean",) if i % 3 == 0 else ()
        made_runs.write(tmp_path, f"run{i}", updates=4 + i % 9, missing=missing, model__path=f"models/m{i % 2}")
    with report_page(browser, page_of(tmp_path)) as tab:
        assert tab.page.locator("#runs input").count() == 60
        assert tab.page.locator(".chart").first.locator("path.line").count() == 60
        assert tab.page.locator(".chart").nth(1).locator("path.line").count() == 40
        assert tab.errors == []


def test_tensorboard_shows_target_beside_proxy_and_what_each_was_trained_with(browser, tmp_path):
    recipe = tiny_run.write(tmp_path)
    for name, rate in (("target", 1e-3), ("proxy", 1e-2)):
        run_directory.write(recipe, run__name=name, learner__learning_rate=rate)
    with dashboard(browser, tmp_path / "runs") as (page, errors):
        chart = page.locator("vz-line-chart2").nth(0)
        assert chart.locator("path.line").count() >= 2
        for name in ("target", "proxy"):
            assert page.get_by_text(name, exact=True).first.is_visible()
        assert errors == []
    with hparams(browser, tmp_path / "runs") as (page, _):
        for said in ("target", "proxy", "0.0010000", "0.010000"):
            assert page.get_by_text(said).first.is_visible()


def test_the_page_of_no_charts_is_a_page_too(browser, tmp_path):
    report = Report("A title", ["A line <b>of text</b>"], [Table("T", ["a"], [["<script>"]])], [], {})
    report.write(tmp_path, "plain")
    with opened(browser, (tmp_path / "plain.html").as_uri(), 800, 600) as tab:
        assert tab.page.locator("td").inner_text() == "<script>"
        assert tab.page.locator("li").inner_text() == "A line <b>of text</b>"
        assert tab.page.locator("#bar").is_hidden()
        assert tab.errors == []
