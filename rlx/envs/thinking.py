"""`chat.thinking` in the words of a chat template: the variables that it is rendered with."""

from __future__ import annotations

import re
from typing import Any

from rlx.config.chat import Thinking

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_SWITCHES = ("enable_thinking", "thinking")  # true or false
_EFFORTS = ("reasoning_effort", "thinking_effort")


def thinking_variables(wanted: Thinking, template: str, prompt: str, *, has_token: bool) -> dict[str, Any]:
    """What a template is given so that the model thinks as much as is wanted.

    off switches thinking off, which leaves an empty think block before the response; of a template without thinking it
    asks nothing. A template that can only switch has `max`, and no effort between.

    Args:
      prompt: rendered with none of them. has_token: <think> is a token of the vocabulary.
    Raises:
      ValueError: the template cannot; what it can, as the end of a sentence.
    """
    switch = _known(template, _SWITCHES) if has_token else None
    effort = _known(template, _EFFORTS)
    if wanted == "off":
        if switch is not None:
            return {switch: False}
        if effort is not None or prompt.rstrip().endswith("<think>"):
            raise ValueError("always thinks; set 'low', 'high' or 'max'" if effort else "always thinks; set 'max'")
        return {}
    if effort is not None:
        return {effort: wanted} | ({switch: True} if switch else {})
    if wanted != "max":
        raise ValueError(
            "can switch thinking on and off and knows no effort; set 'max' or 'off'"
            if switch or prompt.rstrip().endswith("<think>")
            else "knows no thinking; set 'off'"
        )
    if switch is not None:
        return {switch: True}
    if prompt.rstrip().endswith("<think>"):
        return {}
    raise ValueError("knows no thinking; set 'off'")


def _known(template: str, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if re.search(rf"\b{name}\b", template)), None)
