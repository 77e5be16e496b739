"""OpenAI-shaped messages to token ids and back, through a checkpoint's chat template.

Tool calls are read in the Hermes form that Qwen and others write, `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`. A template that knows no tools is given them in the system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from jinja2 import TemplateError

from rlx.agents.conversation import Tools
from rlx.agents.openai import Message, RequestInvalid
from rlx.envs.chat import ChatTokenizer

MARKER = "rlx assistant words"  # stand for a turn that is not rendered
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
TOOLS_TEXT = (
    "You may call functions. These are their signatures:\n<tools>\n{tools}\n</tools>\nTo call one, write\n"
    '<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)


class ChatFormat:
    """`rlx.agents.conversation.Format` of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._knows_tools = self._renders_tools()

    def begin(self, messages: Sequence[Message], tools: Tools) -> Int32[np.ndarray, "prompt"]:
        told = list(messages)
        if tools and not self._knows_tools:
            text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools))
            system = told.pop(0)["content"] if told[0]["role"] == "system" else ""
            told.insert(0, {"role": "system", "content": f"{system}\n\n{text}".strip()})
        return self._tokenizer.encode(self._render(told, tools if self._knows_tools else ()))

    def follow(self, messages: Sequence[Message], ended: bool) -> Int32[np.ndarray, "observation"]:
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKER}]
        text = self._render([*before, *messages], ())
        after = text.rpartition(MARKER)[2] if MARKER in text else ""
        if not after:
            raise RequestInvalid("the chat template does not render the assistant's turns where they are")
        ids = self._tokenizer.encode(after)
        # The policy wrote the end of its turn by itself.
        return ids[1:] if ended and len(ids) and ids[0] == self._tokenizer.end_of_turn_id else ids

    def read(self, response: Int32[np.ndarray, "response"], tools: Tools, turn: int) -> Message:
        text = self._tokenizer.decode(response)
        message: Message = {"role": "assistant", "content": text}
        names = {tool["function"]["name"] for tool in tools}
        calls = [call for found in CALL.findall(text) if (call := _call(found)) and call["name"] in names]
        if calls:
            message["content"] = CALL.sub("", text).strip()
            message["tool_calls"] = [_numbered(call, f"call_{turn}_{i}") for i, call in enumerate(calls)]
        return message

    def ended(self, response: Int32[np.ndarray, "response"]) -> bool:
        return bool(len(response)) and int(response[-1]) in self._tokenizer.stop_token_ids

    def _renders_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": MARKER, "description": "", "parameters": {"type": "object"}}}
        try:
            return MARKER in self._render([{"role": "user", "content": "question"}], [tool])
        except RequestInvalid:
            return False

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        told = [self._for_template(message) for message in messages]
        try:
            return self._tokenizer.render(told, tools=tools or None)
        except TemplateError as error:
            raise RequestInvalid(f"the model's chat template refuses these messages: {error}") from error

    def _for_template(self, message: Message) -> Message:
        """Templates take arguments as objects. Names of special tokens stay text: what is told cannot end a turn."""
        told = dict(message)
        for name in self._tokenizer.special_tokens:
            told["content"] = told["content"].replace(name, f"{name[0]} {name[1:]}")
        if "tool_calls" in message:
            told["tool_calls"] = [
                dict(call) | {"function": _loaded(call["function"])} for call in message["tool_calls"]
            ]
        return told


def _loaded(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(function) | {"arguments": json.loads(function["arguments"])}
    except ValueError:
        return dict(function)


def _call(text: str) -> dict[str, Any] | None:
    """{"name", "arguments"}, or None where the text is no call: the client then sees it as text."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    return call if named and isinstance(call.get("arguments", {}), dict) else None


def _numbered(call: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    return {"id": identifier, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
