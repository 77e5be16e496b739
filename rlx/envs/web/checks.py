"""Checks of a web page: what is done with it, and what must then be seen. Data, not code.

    {name = "the button counts", do = [["open", "/"], ["click", "#plus"]], expect = [["text", "#count", "1"]]}

How a page is read: `rlx.envs.web.sight`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlx.envs.web.browser import ORIGIN, BrowserBroken, Chromium, forget
from rlx.envs.web.sight import BOOLEAN, SEE
from rlx.sandbox.base import SandboxError

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page, Route

# What is waited for has failed to come after so many looks at a page that waits for no answer of its site. Looks, not
# seconds: on a busy machine the page is as slow as they are, and a verdict must not depend on that.
LOOKS = 12
LOOK_S = 0.06
BRIEF = 3  # looks before an element is used: what was done before may still change the page
PATIENCE = 4  # as many times more looks, and a page that has always a request open is taken to be as far as it will be
CHECK_S = 60.0  # a whole check, what it waits for on a busy machine included
REDIRECTIONS = 5
LOST = 2  # pages that hung or crashed, after which the rest of the checks fail unseen: they would, one by one

Words = Sequence[Any]
ARGUMENTS = {
    # What is done: the name and the arguments of each.
    "open": ("path",),
    "reload": (),
    "back": (),
    "click": ("selector",),
    "fill": ("selector", "text"),
    "type": ("text",),
    "press": ("key",),
    "select": ("selector", "value"),
    "check": ("selector",),
    "uncheck": ("selector",),
    "resize": ("width", "height"),
    # What is expected.
    "text": ("selector", "text"),
    "texts": ("selector", "list"),
    "contains": ("selector", "text"),
    "count": ("selector", "number"),
    "visible": ("selector",),
    "hidden": ("selector",),
    "enabled": ("selector",),
    "disabled": ("selector",),
    "value": ("selector", "text"),
    "checked": ("selector", "bool"),
    "attribute": ("selector", "name", "text"),
    "style": ("selector", "property", "text"),
    "beside": ("selector", "selector"),
    "below": ("selector", "selector"),
    "title": ("text",),
    "responds": ("method", "path", "body", "status", "text"),
    "restarts": (),
}
OF_THE_SERVER = ("responds", "restarts")
LEAVING = ("open", "reload", "back")
ACTIONS = (*LEAVING, "click", "fill", "type", "press", "select", "check", "uncheck", "resize")


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    do: tuple[Words, ...]
    expect: tuple[Words, ...]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Check:
        """Raises ValueError for an action or an expectation that does not exist or lacks an argument."""
        check = cls(given["name"], tuple(given.get("do", ())), tuple(given["expect"]))
        for words, actions in [*((w, True) for w in check.do), *((w, False) for w in check.expect)]:
            name, *rest = words
            if name not in ARGUMENTS or (name in ACTIONS) is not actions or len(rest) != len(ARGUMENTS[name]):
                raise ValueError(f"check {check.name!r}: {list(words)} is no {'action' if actions else 'expectation'}")
        return check


@dataclasses.dataclass(frozen=True)
class Checked:
    name: str
    passed: bool
    detail: str  # why not


class Asked(NamedTuple):
    method: str
    path: str  # with its query
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Site(Protocol):
    """Where the page comes from: files or a server, `rlx.envs.web.site`."""

    async def respond(self, asked: Asked) -> Answer: ...

    async def restart(self) -> None:
        """A server is ended and started again."""
        ...


Open = Callable[[], AbstractAsyncContextManager[Site]]


async def run_checks(browser: Chromium, open_site: Open, checks: Sequence[Check]) -> list[Checked]:
    """Each check on a site of its own and a page that remembers nothing: what one does is nothing to the others.

    Whatever a page does wrong is a check that failed. Raises BrowserBroken where the browser is at fault, SandboxError
    where the site's sandbox is, and what `open_site` raises.
    """
    done: list[Checked] = []
    for _ in range(LOST):
        done += await _until_lost(browser, open_site, checks[len(done) :])
        if len(done) == len(checks):
            return done
    return done + [Checked(check.name, False, f"{LOST} pages before it hung") for check in checks[len(done) :]]


async def _until_lost(browser: Chromium, open_site: Open, checks: Sequence[Check]) -> list[Checked]:
    """Checks up to one whose page cannot be used any more, on one profile: to make one is what takes the time."""
    tracked = Tracked()
    done: list[Checked] = []
    async with browser.page(partial(_serve, tracked)) as page:
        for check in checks:
            async with open_site() as tracked.site:
                checked, usable = await _run(browser, page, tracked, check)
            done.append(checked)
            if not usable:
                break
    return done


async def _run(browser: Chromium, page: Page, site: Tracked, check: Check) -> tuple[Checked, bool]:
    """(what came of it, whether the page is as it was)."""
    from playwright.async_api import Error

    problem, usable = f"the page did not answer within {CHECK_S:g} s", True
    try:
        async with asyncio.timeout(CHECK_S):
            problem = await _play(page, site, check)
            await forget(page)
    except (TimeoutError, Error):
        usable = False
    if site.fault is not None:
        raise site.fault
    if not browser.working():
        raise BrowserBroken(f"the browser ended in check {check.name!r}: {problem}")
    return Checked(check.name, not problem, problem), usable


async def _play(page: Page, site: Tracked, check: Check) -> str:
    """Why the check fails; "" where it does not."""
    from playwright.async_api import Error

    try:
        for words in check.do:
            await _act(page, site, *words)
        if any(words[0] in OF_THE_SERVER for words in check.expect):
            await _settle(page, site)
        for words in check.expect:
            if (problem := await _expect(page, site, *words)) is not None:
                return problem
    except Missing as missing:
        return str(missing)
    except Error as error:
        return str(error).splitlines()[0]
    return ""


class Missing(Exception):
    """There is nothing to act on."""


class Tracked:
    """The site of the check that is run, how many requests it has not answered, and why it cannot answer any more."""

    def __init__(self) -> None:
        self.site: Site | None = None
        self.pending = 0
        self.fault: SandboxError | None = None

    async def respond(self, asked: Asked) -> Answer:
        assert self.site is not None
        self.pending += 1
        try:
            return await self.site.respond(asked)
        finally:
            self.pending -= 1


async def _until[T](
    look: Callable[[], Awaitable[T]],
    good: Callable[[T], bool],
    site: Tracked,
    quiet: int = LOOKS,
    most: float = math.inf,
) -> T:
    """What is seen when it is good, or after `quiet` looks at a page whose requests are answered, or `most` at all."""
    while not good(seen := await look()) and quiet > 0 and most > 0:
        quiet, most = quiet - (site.pending == 0), most - 1
        await asyncio.sleep(LOOK_S)
    return seen


async def _settle(page: Page, site: Tracked, looks: int = LOOKS) -> None:
    """Waits for what the page has begun: left or asked about sooner, it might have sent nothing yet."""
    if page.url.startswith(ORIGIN):
        # A look is an answer of the page itself, which is as slow as the machine.
        await _until(page.locator(":root").count, lambda _: False, site, looks, PATIENCE * looks)


async def _serve(site: Tracked, route: Route) -> None:
    """A page has its own site and nothing else."""
    from playwright.async_api import Error

    request = route.request
    if not request.url.startswith(f"{ORIGIN}/"):
        await route.abort()
        return
    path, body = request.url.removeprefix(ORIGIN), request.post_data_buffer or b""
    try:
        answer = await _followed(site, Asked(request.method, path, request.headers, body))
    except SandboxError as fault:  # nobody awaits this function: the check raises it
        site.fault = fault
        await route.abort()
        return
    try:
        await route.fulfill(status=answer.status, headers=dict(answer.headers), body=answer.body)
    except Error:  # headers that are none, or a page that has gone
        with contextlib.suppress(Error):
            await route.abort()


async def _followed(site: Tracked, asked: Asked) -> Answer:
    """Redirections are followed here: the browser would take the second request elsewhere."""
    answer = await site.respond(asked)
    for _ in range(REDIRECTIONS):
        location = next((text for name, text in answer.headers.items() if name.lower() == "location"), "")
        path = location.removeprefix(ORIGIN)
        if answer.status not in (301, 302, 303, 307, 308) or not path.startswith("/"):
            break
        answer = await site.respond(Asked("GET", path, asked.headers, b""))
    return answer


async def _act(page: Page, site: Tracked, name: str, *arguments: Any) -> None:
    await _settle(page, site, LOOKS if name in LEAVING else BRIEF)
    match name, arguments:
        case "open", (path,):
            await page.goto(ORIGIN + path)
        case "reload", ():
            await page.reload()
        case "back", ():
            await page.go_back()
        case "type", (text,):
            await page.keyboard.type(text)
        case "press", (key,):
            await page.keyboard.press(key)
        case "resize", (width, height):
            await page.set_viewport_size({"width": width, "height": height})
        case _, (selector, *rest):
            element = page.locator(selector).first
            if not await _until(lambda: _usable(element), bool, site):
                raise Missing(f"{name} {selector}: there is no such element, or it is hidden or disabled")
            await _act_on(element, name, *rest)


async def _usable(element: Locator) -> bool:
    return await element.is_visible() and await element.is_enabled()


async def _act_on(element: Locator, name: str, *arguments: Any) -> None:
    match name, arguments:
        case "click", ():
            await element.click()
        case "fill", (text,):
            await element.fill(text)
        case "select", (value,):
            await element.select_option(value)
        case (("check" | "uncheck"), ()):
            await element.set_checked(name == "check")


async def _expect(page: Page, site: Tracked, name: str, *arguments: Any) -> str | None:
    """What is seen instead, where the expectation does not come true."""
    if name == "responds":
        return await _responds(site, *arguments)
    if name == "restarts":
        assert site.site is not None
        await site.site.restart()
        return None
    where, expected = (arguments, True) if name in BOOLEAN else (arguments[:-1], arguments[-1])

    def good(seen: Any) -> bool:
        return bool(seen == expected) or (name == "contains" and expected in (seen or ""))

    seen = await _until(lambda: SEE[name](page, *where), good, site)
    told = f"{name} {' '.join(map(str, where))}: expected {expected!r}, found {str(seen)[:200]!r}"
    return None if good(seen) else told


async def _responds(site: Tracked, method: str, path: str, body: str, status: int, expected: Any) -> str | None:
    """Asks the server itself. expected: a text in the answer, or its whole JSON value."""
    headers = {"Content-Type": "application/json"} if body else {}
    answer = await site.respond(Asked(method, path, headers, body.encode()))
    text = answer.body.decode(errors="replace")
    right = expected in text if isinstance(expected, str) else _json(text) == expected
    if answer.status == status and right:
        return None
    return f"{method} {path}: expected {status} {expected!r}, found {answer.status} {text[:200]!r}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
