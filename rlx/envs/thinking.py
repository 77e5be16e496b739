"""`chat.thinking` in the words of a chat template: the variables that it is rendered with.

What a template can is seen in what it renders: a name in it may stand in a comment, or in a branch that is never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError

from rlx.config.chat import Thinking

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_SWITCHES = ("enable_thinking", "thinking")  # true or false
_EFFORTS = ("reasoning_effort", "thinking_effort")
_LEVELS = ("low", "high", "max")

Render = Callable[[Mapping[str, Any]], str]  # a prompt with these variables


def thinking_variables(wanted: Thinking, render: Render, *, has_token: bool) -> dict[str, Any]:
    """What a template is given so that the model thinks as much as is wanted.

    off switches thinking off, which leaves an empty think block before the response; of a template without thinking it
    asks nothing. A template that can only switch has `max`, and no effort between.

    Args:
      render: raises TemplateError for variables that the template refuses. has_token: <think> is in the vocabulary.
    Raises:
      ValueError: the template cannot; what it can, as the end of a sentence.
    """
    switch = next((name for name in _SWITCHES if has_token and _switches(render, name)), None)
    effort, levels = next(((name, known) for name in _EFFORTS if (known := _levels(render, name))), ("", []))
    always = switch is None and (bool(effort) or ends_in(render({}), "<think>"))
    if wanted == "off":
        if always:
            raise ValueError(f"always thinks; set {_choice(levels or ['max'])}")
        return {} if switch is None else _switched_off(render, switch)
    if effort:
        if wanted not in levels:
            raise ValueError(f"does not know this effort; set {_choice(levels)}")
        return {effort: wanted} | ({switch: True} if switch else {})
    if switch is None and not always:
        raise ValueError("knows no thinking; set 'off'")
    if wanted != "max":
        can, choice = ("always thinks", "'max'") if always else ("can switch thinking on and off", "'max' or 'off'")
        raise ValueError(f"{can} and knows no effort; set {choice}")
    return {} if switch is None else {switch: True}


def ends_in(prompt: str, tag: str) -> bool:
    """Whether a prompt ends in <think> or </think>."""
    return prompt.rstrip().endswith(tag)


def _switches(render: Render, name: str) -> bool:
    on, off = (_rendered(render, {name: value}) for value in (True, False))
    return None not in (on, off) and on != off


def _levels(render: Render, name: str) -> list[str]:
    """The efforts that a template tells apart."""
    texts = {level: _rendered(render, {name: level}) for level in _LEVELS}
    told = [text for text in texts.values() if text is not None]
    known = [level for level, text in texts.items() if text is not None and told.count(text) == 1]
    return known if len(known) > 1 else []


def _switched_off(render: Render, switch: str) -> dict[str, Any]:
    variables = {switch: False}
    if not ends_in(render(variables), "</think>"):
        raise ValueError(f"leaves no empty think block where {switch} is false; set 'max'")
    return variables


def _rendered(render: Render, variables: Mapping[str, Any]) -> str | None:
    """None where the template refuses."""
    try:
        return render(variables)
    except TemplateError:
        return None


def _choice(names: list[str]) -> str:
    *some, last = [repr(name) for name in names]
    return f"{', '.join(some)} or {last}" if some else last
