"""Headless Chromium for pages that a policy wrote: no network, a clean profile a page.

Isolated, it lives in a private file system as the sandboxes do: this machine's programs, read-only, and no capability,
so that a page that broke out of its renderer would find no more than a program in a sandbox does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shlex
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.sandbox import isolation

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Route, ViewportSize

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ORIGIN = "http://site.test"  # a name that no network knows
PAGES = 4  # open at once
HOME = "/tmp/home"
READ = ("/var/cache/fontconfig", "/opt")  # beside what sandboxes have: fonts known already, browsers of other makers
SIZE: ViewportSize = {"width": 1024, "height": 768}
ACTION_MS = 20_000.0  # of an action on an element that is there, of a page to come


class BrowserMissing(RuntimeError):
    """There is no browser to open a page with."""


class BrowserBroken(RuntimeError):
    """The browser, not the page in it, failed."""


Serve = Callable[["Route"], Awaitable[None]]


def find_browser() -> str:
    """The path of a Chromium. Raises BrowserMissing with the command that installs one."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise BrowserMissing(f"no browser found ({', '.join(BROWSERS)}); install one: make system-deps")
    return found


class Chromium:
    """An asynchronous context manager; the browser starts with the first page, and again after it has broken.

    isolated: inside bubblewrap, which must be installed.
    """

    def __init__(self, *, isolated: bool, pages: int = PAGES):
        self._isolated, self.turns = isolated, asyncio.Semaphore(pages)  # who holds one may open a page
        self._starting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._browser: Browser | None = None

    async def __aenter__(self) -> Chromium:
        find_browser()
        if importlib.util.find_spec("playwright") is None:
            raise BrowserMissing("playwright, which drives the browser, is not installed: pip install 'rlx[web]'")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._browser = None
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def page(self, serve: Serve) -> AsyncIterator[Page]:
        """A page of a fresh profile, whose every request `serve` answers.

        Raises: BrowserBroken.
        """
        browser = await self._ready()
        try:
            context = await browser.new_context(viewport=SIZE, service_workers="block")
            await context.route("**/*", serve)
            page = await context.new_page()
        except self._error() as error:
            raise BrowserBroken(f"the browser gives no page: {error}") from error
        page.set_default_timeout(ACTION_MS)
        page.on("popup", lambda popup: asyncio.ensure_future(popup.close()))
        try:
            yield page
        finally:
            with contextlib.suppress(self._error()):  # a browser that died closes nothing
                await context.close()

    def working(self) -> bool:
        return self._browser is not None and self._browser.is_connected()

    async def _ready(self) -> Browser:
        async with self._starting:
            if not self.working():
                await self._stack.aclose()
                self._browser = await self._start()
            assert self._browser is not None
            return self._browser

    async def _start(self) -> Browser:
        from playwright.async_api import async_playwright

        playwright = await self._stack.enter_async_context(async_playwright())
        program = find_browser()
        if self._isolated:
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rlx-browser-"))
            program = _wrapped(program, Path(directory))
        # Chromium's own sandbox refuses to run as root, as in a container.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        try:
            browser = await playwright.chromium.launch(executable_path=program, args=arguments)
        except self._error() as error:
            raise BrowserBroken(f"the browser does not start: {error}") from error
        self._stack.push_async_callback(_close, browser)
        return browser

    @staticmethod
    def _error() -> type[Exception]:
        from playwright.async_api import Error

        return Error


async def _close(browser: Any) -> None:
    if browser.is_connected():
        await browser.close()


def _wrapped(browser: str, directory: Path) -> str:
    """A program that runs the browser inside bubblewrap; what it has of /etc is put into `directory`."""
    if shutil.which("bwrap") is None:
        raise BrowserMissing("bubblewrap is not installed, and the browser is to run in it: make system-deps")
    etc = directory / "etc"
    isolation.write_etc(etc)
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"]
    argv += ["--die-with-parent", "--uid", str(isolation.USER), "--gid", str(isolation.USER)]
    argv += isolation.system([place for place in READ if Path(place).is_dir()])
    argv += ["--ro-bind", str(etc), "/etc", "--proc", "/proc", "--dev", "/dev"]
    argv += ["--tmpfs", "/tmp", "--dir", HOME, "--setenv", "HOME", HOME, browser]
    file = directory / "browser"
    file.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n', encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


async def forget(page: Page) -> None:
    """Whatever a page has stored is gone, and so is the page; its process stays, which a new profile would not have."""
    session = await page.context.new_cdp_session(page)
    if page.url.startswith(ORIGIN):  # what a tab keeps; it can only be cleared where it is
        await session.send("DOMStorage.clear", {"storageId": {"securityOrigin": ORIGIN, "isLocalStorage": False}})
    await page.goto("about:blank")
    await session.send("Storage.clearDataForOrigin", {"origin": ORIGIN, "storageTypes": "all"})
    await session.send("Page.resetNavigationHistory")
    await session.detach()
    await page.context.clear_cookies()
    await page.set_viewport_size(SIZE)
