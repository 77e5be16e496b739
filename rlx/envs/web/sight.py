"""What is seen of a page: what each expectation of a check reads, `rlx.envs.web.checks`.

Everything is read through Chromium's isolated world and its DevTools protocol, so that a script of the page that
redefines `document.querySelector` or the text of a node changes nothing but itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page


def _plain(text: str) -> str:
    return " ".join(text.split())


async def _first(page: Page, selector: str, read: Callable[[Locator], Awaitable[Any]]) -> Any:
    """What is read of the first such element; None where there is none."""
    found = await page.locator(selector).all()
    return await read(found[0]) if found else None


async def _text(page: Page, selector: str) -> str | None:
    text = await _first(page, selector, lambda element: element.inner_text())
    return None if text is None else _plain(text)


async def _texts(page: Page, selector: str) -> list[str]:
    found = await page.locator(selector).all()
    return [_plain(await item.inner_text()) for item in found if await item.is_visible()]


async def _hidden(page: Page, selector: str) -> bool:
    return not await page.locator(selector).first.is_visible()


async def _boxes(page: Page, *selectors: str) -> list[dict[str, float]]:
    found = [await _first(page, selector, lambda element: element.bounding_box()) for selector in selectors]
    return [dict(box) for box in found if box is not None]


async def _beside(page: Page, one: str, other: str) -> bool:
    """`other` begins to the right of `one`, at about its height."""
    boxes = await _boxes(page, one, other)
    if len(boxes) < 2:
        return False
    first, second = boxes
    return second["x"] >= first["x"] + first["width"] - 1 and abs(second["y"] - first["y"]) < first["height"]


async def _below(page: Page, one: str, other: str) -> bool:
    """`other` begins where `one` ends, or lower."""
    boxes = await _boxes(page, one, other)
    return len(boxes) == 2 and boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"] - 1


async def _style(page: Page, selector: str, name: str) -> str:
    """The computed style, as the browser itself says it."""
    session = await page.context.new_cdp_session(page)
    await session.send("DOM.enable")
    await session.send("CSS.enable")
    root = await session.send("DOM.getDocument", {"depth": 0})
    node = await session.send("DOM.querySelector", {"nodeId": root["root"]["nodeId"], "selector": selector})
    if not node["nodeId"]:
        return ""
    styles = await session.send("CSS.getComputedStyleForNode", {"nodeId": node["nodeId"]})
    return next((entry["value"] for entry in styles["computedStyle"] if entry["name"] == name), "")


BOOLEAN = ("visible", "hidden", "enabled", "disabled", "beside", "below")
SEE: Mapping[str, Callable[..., Awaitable[Any]]] = {
    "text": _text,
    "texts": _texts,
    "contains": _text,
    "count": lambda page, selector: page.locator(selector).count(),
    "visible": lambda page, selector: page.locator(selector).first.is_visible(),
    "hidden": _hidden,
    "enabled": lambda page, selector: _first(page, selector, lambda element: element.is_enabled()),
    "disabled": lambda page, selector: _first(page, selector, lambda element: element.is_disabled()),
    "value": lambda page, selector: _first(page, selector, lambda element: element.input_value()),
    "checked": lambda page, selector: _first(page, selector, lambda element: element.is_checked()),
    "attribute": lambda page, selector, name: _first(page, selector, lambda element: element.get_attribute(name)),
    "style": _style,
    "beside": _beside,
    "below": _below,
    "title": lambda page: page.title(),
}
