"""OpenAI-shaped messages to token ids and back, through a checkpoint's chat template.

Tool calls are read as `rlx.envs.tool_calls` reads them, in the Hermes form that Qwen and others write. One that cannot
be read stays text. A template that knows no tools is given them in the system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from jinja2 import TemplateError

from rlx.agents.conversation import Tools
from rlx.agents.openai import Message, RequestInvalid
from rlx.envs.chat import ChatTokenizer
from rlx.envs.tool_calls import Malformed, as_characters, describe_schemas, read_hermes, without_thoughts

MARKER = "rlx assistant words"  # stand for a turn that is not rendered


class ChatFormat:
    """`rlx.agents.conversation.Format` of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._knows_tools = self._renders_tools()
        self._thinking = tokenizer.begins_thoughts

    def begin(self, messages: Sequence[Message], tools: Tools) -> Int32[np.ndarray, " prompt"]:
        told = list(messages)
        if tools and not self._knows_tools:
            text = describe_schemas(tools)
            system = told.pop(0)["content"] if told[0]["role"] == "system" else ""
            told.insert(0, {"role": "system", "content": f"{system}\n\n{text}".strip()})
        return self._tokenizer.encode(self._render(told, tools if self._knows_tools else ()))

    def follow(
        self, messages: Sequence[Message], response: Int32[np.ndarray, " response"]
    ) -> Int32[np.ndarray, " observation"]:
        before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKER}]
        text = self._render([*before, *messages], ())
        after = text.rpartition(MARKER)[2] if MARKER in text else ""
        if not after:
            raise RequestInvalid("the chat template does not render the assistant's turns where they are")
        ids = self._tokenizer.encode(after)
        ends = len(ids) and ids[0] == self._tokenizer.end_of_turn_id
        return self._tokenizer.after(response, ids[1:] if ends else ids)

    def read(self, response: Int32[np.ndarray, " response"], tools: Tools, turn: int) -> Message:
        text = self._tokenizer.decode(response)
        said = without_thoughts(text, thinking=self._thinking)
        thoughts = text.removesuffix(said)
        calls: list[dict[str, Any]] = []
        for written, call in read_hermes(said, [tool["function"]["name"] for tool in tools]):
            if not isinstance(call, Malformed) and isinstance(call.get("arguments", {}), dict):
                said = said.replace(written, "", 1)
                calls.append(_numbered(call, f"call_{turn}_{len(calls)}"))
        if not calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": f"{thoughts}{said}".strip(), "tool_calls": calls}

    def ended(self, response: Int32[np.ndarray, " response"]) -> bool:
        return bool(len(response)) and int(response[-1]) in self._tokenizer.stop_token_ids

    def _renders_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": MARKER, "description": "", "parameters": {"type": "object"}}}
        try:
            return MARKER in self._render([{"role": "user", "content": "question"}], [tool])
        except RequestInvalid:
            return False

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        told = [self._as_text(_for_template(message)) for message in messages]
        try:
            return self._tokenizer.render(told, tools=self._as_text(list(tools)) or None)
        except TemplateError as error:
            raise RequestInvalid(f"the model's chat template refuses these messages: {error}") from error

    def _as_text(self, value: Any) -> Any:
        """JSON whose texts cannot end a turn."""
        if isinstance(value, str):
            return self._tokenizer.as_text(as_characters(value))
        if isinstance(value, Mapping):
            return {self._as_text(key): self._as_text(part) for key, part in value.items()}
        return [self._as_text(part) for part in value] if isinstance(value, list | tuple) else value


def _for_template(message: Message) -> Message:
    """Templates take arguments as objects."""
    if "tool_calls" not in message:
        return message
    calls = [dict(call) | {"function": _loaded(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _loaded(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(function) | {"arguments": json.loads(function["arguments"])}
    except ValueError:
        return dict(function)


def _numbered(call: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
    return {"id": identifier, "type": "function", "function": {"name": call["name"], "arguments": arguments}}
