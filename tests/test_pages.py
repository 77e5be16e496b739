"""The sample page and TensorBoard's dashboard as a browser shows them."""

import pytest

from docs.screenshots import dashboard, sample_page, started
from rlx.envs.web import browser as browsers
from rlx.envs.web.browser import BrowserMissing, find_browser
from tests import browser as browser_tests
from tests import run_directory, tiny_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    browser_tests.require()
    return run_directory.write(tiny_run.write(tmp_path_factory.mktemp("pages")))


@pytest.fixture(scope="module")
def browser(run):
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def opened(browser, run):
    with sample_page(browser, run) as tab:
        yield tab


@pytest.fixture
def page(opened):
    """The sample page as it is when it is opened; its scripts must not have failed when the test is over."""
    opened.page.reload()
    yield opened.page
    assert opened.errors == []


def cards(page):
    return page.locator("article.card")


def test_the_sample_page(page):
    assert page.title() == "tiny: samples"
    assert page.locator("h1").inner_text() == "tiny"
    tiles = page.locator(".tile").all_inner_texts()
    assert [tile.split("\n")[0] for tile in tiles] == [
        "held-out pass rate, base",
        "held-out pass rate, after",
        "pass rate in training",
        "mean reward in training",
    ]
    assert page.locator("h2").all_inner_texts() == ["Best", "Worst"]
    assert cards(page).count() == 20
    first = cards(page).first.inner_text()
    for said in (
        "reward 1",
        "update 4",
        "4 tokens, stop",
        "1+1",
        "answer 2 · read as 7",
        "as the model saw it, 8 tokens",
    ):
        assert said in first


def test_tokens_are_coloured_by_the_gap_and_say_what_they_are(page):
    page.select_option("#update", "update 2")
    page.select_option("#order", "gap")
    tokens = cards(page).first.locator(".response span")
    colours = [tokens.nth(i).evaluate("e => e.style.background") for i in range(4)]
    assert colours[0] == ""
    assert len(set(colours)) == 4
    assert "--less" in colours[3]
    assert "--more" in colours[1]
    tokens.nth(3).hover()
    said = page.locator("#tip").inner_text()
    assert "-2.5" in said
    assert "version 0" in said
    page.select_option("#colour", "none")
    assert cards(page).first.locator(".response span").nth(3).evaluate("e => e.style.background") == ""


def test_samples_are_filtered(page):
    page.select_option("#reward", "1 and above")
    assert cards(page).count() == 2
    page.select_option("#reward", "")
    page.select_option("#update", "evaluation: base")
    assert cards(page).count() == 2
    page.fill("#find", "nowhere")
    assert cards(page).count() == 0
    assert page.locator("#count").inner_text() == "0 of 20 samples"


@pytest.mark.parametrize("scheme, light", [("light", True), ("dark", False)])
def test_it_is_readable_by_day_and_by_night(page, scheme, light):
    page.emulate_media(color_scheme=scheme)
    both = "[s.color, s.backgroundColor].map((c) => c.match(/\\d+/g).map(Number))"
    style = f"(e) => {{ const s = getComputedStyle(e); return {both}; }}"
    text, ground = page.locator("body").evaluate(style)
    assert (sum(ground) > sum(text)) is light
    assert abs(sum(ground) - sum(text)) > 450


def test_the_dashboard_of_tensorboard(browser, run):
    with dashboard(browser, run) as (page, errors):
        for title in ("Is it learning?", "Do sampler and trainer agree?", "all of optimizer/"):
            assert page.get_by_text(title, exact=True).first.is_visible(), title
        assert page.get_by_text("held-out pass rate, with its interval").first.is_visible()
        assert not page.get_by_text("grad_norm_clipped", exact=False).first.is_visible(), "folded"
        assert page.locator("vz-line-chart2 path.line").count() >= 3
        assert errors == []


def test_a_missing_browser_is_said_with_the_command(monkeypatch):
    monkeypatch.setattr(browsers.shutil, "which", lambda name: None)
    with pytest.raises(BrowserMissing, match="make system-deps"):
        find_browser()
