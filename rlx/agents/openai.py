"""OpenAI's chat completions as records: what a client may ask, what it is refused with the reason, what it is answered.

A setting that an engine cannot honour is refused, unless the run's own sampling is used in its place by declaration
(`Sampling.RUN`): the recorded log-probs are those of one distribution, the run's.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.types import StopReason

Message = dict[str, Any]  # role, content (text), and tool_calls or tool_call_id

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FINISH = {
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORT: "length",
    StopReason.SESSION_LIMIT: "length",
}
# Without a meaning here: they change neither what is sampled nor how it is answered.
WITHOUT_EFFECT = ("user", "metadata", "store", "stream_options", "parallel_tool_calls", "safety_identifier")
# Of the sampling: the value that asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "seed": (None,),
}
# Of the form of an answer: the only values that are honoured.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "stop": (None, [], ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
KEYS = (
    "model", "messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "stream",
    *WITHOUT_EFFECT, *NEUTRAL, *FIXED,
)  # fmt: skip


class Sampling(enum.StrEnum):
    """Whose temperature and length hold."""

    CLIENT = "client"  # the request's; a setting that engines do not have is refused
    RUN = "run"  # the run's, whatever a request says


class RequestInvalid(ValueError):
    """A request that cannot be served; `code` is OpenAI's short name of the reason."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: tuple[Message, ...]  # normalised: content is text, developer is system
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    temperature: float | None
    stream: bool


@dataclasses.dataclass(frozen=True)
class Reply:
    """The assistant's message and what is counted of it."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int


def parse_request(body: Any, sampling: Sampling) -> ChatRequest:
    """Raises RequestInvalid; it names the key and the value."""
    if not isinstance(body, dict):
        raise RequestInvalid("the body must be a JSON object")
    for key in body:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            raise RequestInvalid(f"unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    for key, honoured in FIXED.items():
        if body.get(key) not in honoured:
            raise RequestInvalid(f"{key} = {body[key]!r} is not supported: leave it out or set {honoured[-1]!r}")
    for key, neutral in NEUTRAL.items():
        if sampling is Sampling.CLIENT and body.get(key) not in neutral:
            raise RequestInvalid(f"{key} = {body[key]!r}: engines sample by temperature alone; leave it out")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestInvalid("messages must be a list that is not empty")
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        tools = []
    return ChatRequest(
        model=str(body.get("model", "")),
        messages=tuple(_message(i, message) for i, message in enumerate(messages)),
        tools=tuple(_tool(tool) for tool in tools),
        max_tokens=_limit(body),
        temperature=_temperature(body.get("temperature")),
        stream=bool(body.get("stream", False)),
    )


def _limit(body: Mapping[str, Any]) -> int | None:
    given = body.get("max_completion_tokens", body.get("max_tokens"))
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool):
        raise RequestInvalid(f"max_tokens = {given!r}: it must be a whole number, not {type(given).__name__}")
    if given < 1:
        raise RequestInvalid(f"max_tokens = {given!r}: it must be at least 1")
    return given


def _temperature(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value <= 2:
        raise RequestInvalid(f"temperature = {value!r}: it must be from 0 (greedy) to 2")
    return float(value)


def _tool(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or not isinstance(function.get("name"), str):
        raise RequestInvalid(f'tools: {tool!r} is no {{"type": "function", "function": {{"name": ...}}}}')
    return tool


def _message(index: int, message: Any) -> Message:
    role = ROLES.get(message.get("role", "")) if isinstance(message, dict) else None
    if role is None:
        raise RequestInvalid(f"messages[{index}]: role must be one of {', '.join(ROLES)}, got {message!r}")
    normal: Message = {"role": role, "content": _text(index, message.get("content"))}
    if role == "tool":
        normal["tool_call_id"] = str(message.get("tool_call_id", ""))
    if role == "assistant" and message.get("tool_calls"):
        normal["tool_calls"] = [_call(index, call) for call in message["tool_calls"]]
    return normal


def _text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestInvalid(f"messages[{index}]: content must be text or parts of type 'text', got {content!r:.200}")


def _call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        raise RequestInvalid(f"messages[{index}]: a tool call has function.name and function.arguments (JSON as text)")
    named = {"name": str(function.get("name", "")), "arguments": function["arguments"]}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def same_message(one: Message, other: Message) -> bool:
    """Whether a client says again what was said; the space around a text and the spelling of JSON may differ."""
    return _canonical(one) == _canonical(other)


def _canonical(message: Message) -> tuple[Any, ...]:
    calls = [
        (call["id"], call["function"]["name"], _loaded(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"].strip(), message.get("tool_call_id", ""), calls


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------------------------- answers


def completion(reply: Reply, identifier: str, model: str) -> dict[str, Any]:
    """The body of an answer."""
    message = dict(reply.message) | {"content": reply.message["content"] or None, "refusal": None}
    return {
        "id": identifier,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}],
        "usage": _usage(reply),
    }


def stream_chunks(reply: Reply, identifier: str, model: str) -> Sequence[bytes]:
    """The same as server-sent events. The text comes in one piece: engines give whole completions."""
    message = reply.message
    delta: dict[str, Any] = {"role": "assistant", "content": message["content"] or None}
    if "tool_calls" in message:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    base = {"id": identifier, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    first = base | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = base | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}], "usage": _usage(reply)}
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in (first, last)), b"data: [DONE]\n\n"]


def error_body(error: RequestInvalid) -> dict[str, Any]:
    said = {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": None}
    return {"error": said}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else FINISH[reply.stop_reason]


def _usage(reply: Reply) -> dict[str, int]:
    prompt, written = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
