"""How the policy writes tool calls, and how it is told what came of them.

    hermes  <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>, answered in <tool_response>: Qwen's and
            Hermes' way
    plain   a fenced block whose language is the tool's name; its text is the argument of a tool with one, else JSON

Thoughts are not said: calls in them are none, and a response that ends in the middle of a thought says nothing. A call
that cannot be read is no failure: the policy is told.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.config.chat import ToolFormatName
from rlx.envs.env import Tool, ToolCall

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"^```([\w-]+)[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Malformed:
    """Something that was meant as a call and is none."""

    problem: str  # for the policy


def without_thoughts(text: str, *, thinking: bool = False) -> str:
    """What a response says; "" where its thoughts never end. thinking: its prompt has opened them."""
    _, end, said = text.rpartition("</think>")
    if thinking and not end:
        return ""
    return "" if said.lstrip().startswith("<think>") else said


def parse_calls(
    form: ToolFormatName, text: str, tools: Sequence[Tool], *, thinking: bool = False
) -> list[ToolCall | Malformed]:
    """The calls of a response, in their order; none: it is said to whoever asked. thinking: as above."""
    said = without_thoughts(text, thinking=thinking)
    if form == "hermes":
        named = {tool.name: tool for tool in tools}
        read = [call for _, call in read_hermes(said, list(named))]
        return [c if isinstance(c, Malformed) else _checked(named[c["name"]], c.get("arguments", {})) for c in read]
    known = {tool.name: tool for tool in tools}
    return [_fenced(match, known[match[1]]) for match in _FENCED.finditer(said) if match[1] in known]


def without_calls(form: ToolFormatName, text: str, tools: Sequence[Tool], *, thinking: bool = False) -> str:
    """What is said beside the calls, thoughts left out."""
    said = without_thoughts(text, thinking=thinking)
    if form == "hermes":
        return _HERMES.sub("", said).strip()
    names = {tool.name for tool in tools}
    return _FENCED.sub(lambda match: "" if match[1] in names else match[0], said).strip()


def write_call(form: ToolFormatName, call: ToolCall) -> str:
    """A call as the policy should write it."""
    if form == "hermes":
        body = json.dumps({"name": call.tool, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    values = list(call.arguments.values())
    body = values[0] if len(values) == 1 else json.dumps(dict(call.arguments), ensure_ascii=False)
    return f"```{call.tool}\n{body}\n```"


def write_observations(form: ToolFormatName, texts: Sequence[str]) -> str:
    """What came of the calls of one response, as one user's turn."""
    wrapped = (f"<tool_response>\n{text}\n</tool_response>" if form == "hermes" else text for text in texts)
    return "\n".join(wrapped)


def describe_tools(form: ToolFormatName, tools: Sequence[Tool]) -> str:
    """For a system message, where the chat template does not describe tools itself."""
    if form == "hermes":
        return describe_schemas([tool.schema() for tool in tools])
    return "\n".join(f"{tool.description}: write\n{_usage(tool)}" for tool in tools)


def describe_schemas(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The same of tools as chat templates take them, in the Hermes format."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    example = '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    return f"Tools:\n<tools>\n{listed}\n</tools>\nTo call one, write\n{example}"


def _usage(tool: Tool) -> str:
    parameters = tool.parameters
    return write_call("plain", ToolCall(tool.name, {name: f"({text})" for name, text in parameters.items()}))


# ------------------------------------------------------------------------------------------------------------- reading


def read_hermes(said: str, names: Sequence[str]) -> list[tuple[str, dict[str, Any] | Malformed]]:
    """Each call as it stands in a text, and {"name": one of `names`, "arguments": ...} of it, or what is wrong."""
    return [(match[0], _hermes(match, names)) for match in _HERMES.finditer(said)]


def _hermes(match: re.Match[str], names: Sequence[str]) -> dict[str, Any] | Malformed:
    if not match[2]:
        return Malformed("the call has no </tool_call>")
    try:
        call = json.loads(match[1])
    except (json.JSONDecodeError, RecursionError) as error:
        return Malformed(f"the call is not JSON: {error}")
    if not isinstance(call, dict) or "name" not in call:
        return Malformed('a call is {"name": ..., "arguments": {...}}')
    if call["name"] not in names:
        return Malformed(f"there is no tool {call['name']!r}; the tools are: {', '.join(names) or 'none'}")
    return call


def _fenced(match: re.Match[str], tool: Tool) -> ToolCall | Malformed:
    if not match[3]:
        return Malformed(f"the block of {tool.name} has no closing ```")
    if len(tool.parameters) == 1:
        return _call(tool, {name: match[2].removesuffix("\n") for name in tool.parameters})
    try:
        return _checked(tool, json.loads(match[2]))
    except (json.JSONDecodeError, RecursionError) as error:
        return Malformed(f"the block of {tool.name} must be a JSON object with {_named(tool.parameters)}: {error}")


def _checked(tool: Tool, arguments: Any) -> ToolCall | Malformed:
    if not isinstance(arguments, dict) or arguments.keys() != tool.parameters.keys():
        return Malformed(f"the arguments of {tool.name} are an object with {_named(tool.parameters)}")
    wrong = [name for name, value in arguments.items() if not isinstance(value, str)]
    if wrong:
        return Malformed(f"{_named(wrong)} of {tool.name} must be a text")
    return _call(tool, arguments)


def _call(tool: Tool, arguments: Mapping[str, str]) -> ToolCall | Malformed:
    """Of texts that a file or a command can have: JSON also writes what is no character."""
    if nul := [name for name, value in arguments.items() if "\0" in value]:
        return Malformed(f"{_named(nul)} of {tool.name} has a NUL character")
    return ToolCall(tool.name, {name: as_characters(value) for name, value in arguments.items()})


def as_characters(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs, as JSON and names of files may have, become "?"."""
    return text.encode(errors="replace").decode()


def _named(names: Mapping[str, str] | Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
