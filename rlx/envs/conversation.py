"""A conversation as token ids: only what a turn adds is rendered and encoded, so earlier ids never change.

The chat template is read once: what it writes between a response and the next one, around an observation. It is asked
for whole conversations only to prove that it writes the same there. One that rewrites what was said before (Qwen3's
drops earlier thinking) cannot be used for several turns, since the policy would see another conversation than it had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from rlx.config.chat import ToolFormatName
from rlx.envs.chat import ChatTokenizer
from rlx.envs.env import Tool, ToolCall
from rlx.envs.tool_calls import describe_tools, parse_calls, write_call, write_observations

_QUESTION, _OBSERVATION = "rlx asks", "rlx observes"


class HistoryRewritten(ValueError):
    """The chat template shows an earlier turn otherwise than it was written."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """How a chat with tools begins and goes on. Make it with `open_conversation`."""

    chat: ChatTokenizer
    form: ToolFormatName
    tools: tuple[Tool, ...]
    before: str  # of an observation, after the end of the response's turn
    after: str  # behind it, up to where the next response begins
    thinking: bool  # a response begins in the middle of its thoughts

    def opening(self, question: str) -> Int32[np.ndarray, " prompt"]:
        """Up to where the first response begins."""
        return self.chat.encode(render_opening(self.chat, self.form, self.tools, question))

    def following(
        self, observations: Sequence[str], response: Int32[np.ndarray, " written"]
    ) -> Int32[np.ndarray, " m"]:
        """What is appended to a response: its end of turn where it lacks it, what it is told, the next one's opening.

        Names of special tokens in an observation stay text: a tool's output cannot end a turn.
        """
        said = write_observations(self.form, [self.chat.as_text(text) for text in observations])
        return self.chat.after(response, self.chat.encode(f"{self.before}{said}{self.after}"))


def render_opening(chat: ChatTokenizer, form: ToolFormatName, tools: Sequence[Tool], question: str) -> str:
    """The prompt as text. Tools are described by the template where it can (hermes), else in the system message."""
    native = form == "hermes" and chat.knows("tools")
    described = "" if native or not tools else describe_tools(form, tools)
    return chat.render(chat.messages(question, described), tools=_schemas(tools) if native else None)


def _schemas(tools: Sequence[Tool]) -> list[dict[str, object]] | None:
    return [tool.schema() for tool in tools] or None


def open_conversation(chat: ChatTokenizer, form: ToolFormatName, tools: tuple[Tool, ...]) -> Conversation:
    """Read off the template how turns are joined, and prove that it joins any number of them so.

    Raises:
      HistoryRewritten: an earlier turn is shown otherwise than it was said. ValueError: turns cannot be joined.
    """
    if chat.thinks and "</think>" in chat.special_tokens:
        raise ValueError("</think> is a special token of the tokenizer, so thoughts cannot be told from words")
    native = form == "hermes" and chat.knows("tools")
    schemas = _schemas(tools) if native else None
    start = chat.messages(_QUESTION, "" if native or not tools else describe_tools(form, tools))
    told = write_observations(form, [_OBSERVATION])

    def render(responses: Sequence[str]) -> str:
        turns = [
            turn
            for said in responses
            for turn in ({"role": "assistant", "content": said}, {"role": "user", "content": told})
        ]
        return chat.render([*start, *turns], tools=schemas)

    opening, (first, second) = render([]), _probes(chat, form, tools)
    end = chat.name_of(chat.end_of_turn_id)
    joined = _after(render([first]), opening + first, chat)
    if not joined.startswith(end):
        raise ValueError(f"the chat template does not end a response with {end!r}: after one it writes {joined[:40]!r}")
    before, found, after = joined.removeprefix(end).partition(_OBSERVATION)
    if not found:
        raise ValueError(f"the chat template changes an observation: after a response it writes {joined!r}")
    _after(render([first, second]), opening + first + joined + second, chat)
    whole = render([first, second])
    if whole != opening + first + joined + second + joined:
        raise HistoryRewritten(_refusal(chat, whole[len(opening + first + joined + second) :], joined))
    told_before, told_after = told.split(_OBSERVATION)
    before, after = before.removesuffix(told_before), after.removeprefix(told_after)
    conversation = Conversation(chat, form, tools, before, after, chat.begins_thoughts)
    ids = conversation.following([_OBSERVATION], np.array([chat.end_of_turn_id], np.int32))
    if chat.written_out(ids) != joined.removeprefix(end):
        raise ValueError(f"the tokenizer cannot write what stands between turns: {chat.written_out(ids)!r}")
    return conversation


def _probes(chat: ChatTokenizer, form: ToolFormatName, tools: Sequence[Tool]) -> tuple[str, str]:
    """Two responses of what a policy may write: thoughts where it thinks, a call, spaces at the end."""
    opening = "" if chat.begins_thoughts else "<think>\n"
    thought = f"{opening}rlx thinks\n</think>\n\n" if chat.thinks else ""
    calls = [write_call(form, ToolCall(tool.name, dict.fromkeys(tool.parameters, "x"))) for tool in tools[:1]]
    first, second = ("\n".join([f"{thought}rlx says {word}", *calls]) for word in ("one", "two"))
    assert len(parse_calls(form, first, tools)) == len(calls)
    return first, second


def _after(rendered: str, expected: str, chat: ChatTokenizer) -> str:
    """What a rendered conversation has behind `expected`, with which it must begin."""
    if rendered.startswith(expected):
        return rendered[len(expected) :]
    at = next((i for i, (a, b) in enumerate(zip(rendered, expected)) if a != b), min(len(rendered), len(expected)))
    raise HistoryRewritten(_refusal(chat, rendered[at : at + 40], expected[at : at + 40]))


def _refusal(chat: ChatTokenizer, shown: str, said: str) -> str:
    return (
        f"the chat template rewrites earlier turns: it shows {shown!r} where the conversation had {said!r}, so a "
        "policy would not see what it wrote. Set chat.template = 'chatml' (our own, which keeps every turn), if the "
        "model has its <|im_start|> and <|im_end|>, or put a chat_template.jinja that keeps them beside "
        "tokenizer.json"
    )
