"""The browser of web projects: what is missing is said at the start; one that died is started again."""

import asyncio
from pathlib import Path

import psutil
import pytest

from rlx.envs.web import browser
from rlx.envs.web.browser import BrowserMissing, Chromium, _wrapped
from tests import browser as browser_tests


async def enter(isolated=False):
    async with Chromium(isolated=isolated):
        return True


@pytest.mark.parametrize(
    "module, name, found, said",
    [
        (browser.shutil, "which", None, "make system-deps"),
        (browser.importlib.util, "find_spec", None, r"pip install 'rlx\[web\]'"),
    ],
)
def test_what_is_missing_is_said_at_the_start(monkeypatch, module, name, found, said):
    monkeypatch.setattr(browser, "find_browser", browser.find_browser if name == "which" else lambda: "chromium")
    monkeypatch.setattr(module, name, lambda asked: found)
    with pytest.raises(BrowserMissing, match=said):
        asyncio.run(enter())


def test_isolation_needs_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    with pytest.raises(BrowserMissing, match="bubblewrap is not installed"):
        _wrapped("/usr/bin/chromium", tmp_path)


@pytest.mark.slow
def test_a_browser_that_died_is_started_again():
    browser_tests.require()

    async def serve(route):
        await route.fulfill(body="<h1>Hello</h1>", content_type="text/html")

    async def main():
        seen = []
        async with Chromium(isolated=True) as chromium:
            for _ in range(2):
                async with chromium.page(serve) as page:
                    await page.goto("http://site.test/")
                    seen.append(await page.locator("h1").inner_text())
                await chromium._browser.close()
                assert not chromium.working()
        return seen

    assert asyncio.run(main()) == ["Hello", "Hello"]


@pytest.mark.slow
def test_pages_run_without_capabilities_and_see_no_file_of_this_machine(tmp_path):
    browser_tests.require()
    planted = tmp_path / "secret"
    planted.write_text("secret")

    async def main():
        async with Chromium(isolated=True) as chromium, chromium.page(lambda route: route.fulfill(body="")) as page:
            await page.goto("http://site.test/")
            inside = [p.pid for p in psutil.Process().children(recursive=True) if "--type=renderer" in p.cmdline()]
            return [
                (Path(f"/proc/{pid}/status").read_text(), Path(f"/proc/{pid}/root{planted}").exists()) for pid in inside
            ]

    found = asyncio.run(main())
    assert found
    assert all("CapEff:\t0000000000000000" in status and not there for status, there in found)
