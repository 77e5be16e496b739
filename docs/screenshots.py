"""Pictures of a run for the README, by headless Chromium: TensorBoard's custom dashboard and the sample page.

python -m docs.screenshots runs/quickstart [docs/figures]        or: make screenshots RUN=runs/quickstart

`make system-deps` installs the browser.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page, sync_playwright

from rlx.board import DASHBOARD, describe_sweep, event_folders, launch, link
from rlx.envs.web.browser import find_browser
from rlx.metrics.sample_page import write_page
from rlx.metrics.view import read_run
from rlx.show import tokenizer_of

WAIT_MS = 60_000  # for TensorBoard to read its events on a busy machine


class Opened(NamedTuple):
    page: Page
    errors: list[str]  # of the console and of scripts, so far


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """A headless browser."""
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses to run as root, as in a container; the pages are our own.
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, width: int, height: int) -> Iterator[Opened]:
    """A page in a window of its own."""
    page = browser.new_page(viewport={"width": width, "height": height})
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(f"{request.url}: {request.failure}"))
    page.goto(url)
    yield Opened(page, errors)
    page.close()


@contextlib.contextmanager
def dashboard(browser: Browser, run: Path, width: int = 1480, height: int = 1090) -> Iterator[Opened]:
    """TensorBoard's custom dashboard of a run, with its first charts drawn."""
    with tempfile.TemporaryDirectory(prefix="rlx-screenshots-") as directory:
        link(event_folders(run), Path(directory))
        url = launch(Path(directory), port=0)
        with opened(browser, f"{url}{DASHBOARD}&_smoothingWeight=0", width, height) as tab:
            tab.page.wait_for_selector("vz-line-chart2 path.line", state="attached", timeout=WAIT_MS)
            tab.page.wait_for_timeout(3000)  # one line is drawn after the other
            yield tab


@contextlib.contextmanager
def sample_page(browser: Browser, run: Path, width: int = 1240, height: int = 900) -> Iterator[Opened]:
    """The sample page of a run."""
    with tempfile.TemporaryDirectory(prefix="rlx-screenshots-") as directory:
        file = Path(directory) / "samples.html"
        write_page(run, tokenizer_of(read_run(run)), file)
        with opened(browser, file.as_uri(), width, height) as tab:
            yield tab


@contextlib.contextmanager
def hparams(browser: Browser, runs: Path, width: int = 1480, height: int = 900) -> Iterator[Opened]:
    """TensorBoard's table of a directory of runs: what each was trained with and what came of it."""
    with tempfile.TemporaryDirectory(prefix="rlx-screenshots-") as directory:
        link(event_folders(runs), Path(directory))
        describe_sweep(runs, Path(directory))
        url = launch(Path(directory), port=0)
        with opened(browser, f"{url}#hparams", width, height) as tab:
            tab.page.wait_for_selector("text=learner.learning_rate", state="visible", timeout=WAIT_MS)
            tab.page.wait_for_timeout(3000)
            yield tab


@contextlib.contextmanager
def report_page(browser: Browser, file: Path, width: int = 1360, height: int = 1000) -> Iterator[Opened]:
    """A page that `rlx compare`, `agree` or `edge` has written."""
    with opened(browser, file.as_uri(), width, height) as tab:
        yield tab


def point_at_the_largest_gap(page: Page) -> None:
    """Of the tokens in view, so that its tooltip shows."""
    token = page.evaluate_handle("""() => [...document.querySelectorAll(".response span")]
        .filter((e) => e.token && e.getBoundingClientRect().bottom < innerHeight - 120)
        .sort((a, b) => Math.abs(b.token[3] ?? 0) - Math.abs(a.token[3] ?? 0))[0]""").as_element()
    if token is not None:
        token.hover()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.screenshots", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run, or a page of `rlx compare` and the like, NAME.html")
    parser.add_argument("to", type=Path, nargs="?", default=Path("docs/figures"))
    arguments = parser.parse_args(argv)
    with started() as browser:
        if arguments.run.suffix == ".html":
            with report_page(browser, arguments.run) as tab:
                _photograph(tab, arguments.to / f"{arguments.run.stem}_page.png")
            return 0
        with dashboard(browser, arguments.run) as tab:
            _photograph(tab, arguments.to / "tensorboard.png")
        with sample_page(browser, arguments.run) as tab:
            point_at_the_largest_gap(tab.page)
            _photograph(tab, arguments.to / "samples.png")
    return 0


def _photograph(tab: Opened, to: Path) -> None:
    tab.page.screenshot(path=to)
    print(f"{to}: {to.stat().st_size / 1000:.0f} kB", *tab.errors)


if __name__ == "__main__":
    sys.exit(main())
