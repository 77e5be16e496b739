"""Tool calls as the policy writes them: read, described, written back; malformed ones explained."""

import json

import pytest

from rlx.envs.env import Tool, ToolCall
from rlx.envs.tool_calls import (
    Malformed,
    describe_tools,
    parse_calls,
    without_calls,
    write_call,
    write_observations,
)

PYTHON = Tool("python", "Runs a program", {"code": "the program"})
EDIT = Tool("edit", "Changes a file", {"path": "its name", "text": "its content"})
TOOLS = (PYTHON, EDIT)
CALLS = [ToolCall("python", {"code": "print('</tool>')\nx = {}"}), ToolCall("edit", {"path": "a.py", "text": "é\n```"})]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize("form", ["hermes", "plain"])
@pytest.mark.parametrize("call", CALLS, ids=["python", "edit"])
def test_what_is_written_is_read_back(form, call):
    text = f"Let me see.\n{write_call(form, call)}\nThat was it."
    assert parse_calls(form, text, TOOLS) == [call]
    assert without_calls(form, text, TOOLS).split() == ["Let", "me", "see.", "That", "was", "it."]


@pytest.mark.parametrize("form", ["hermes", "plain"])
def test_several_calls_come_in_their_order_and_thoughts_are_none(form):
    thought = write_call(form, ToolCall("python", {"code": "thought"}))
    text = f"<think>\n{thought}\n</think>\n\n" + "\n".join(write_call(form, call) for call in [*CALLS, CALLS[0]])
    assert parse_calls(form, text, TOOLS) == [*CALLS, CALLS[0]]


@pytest.mark.parametrize("form", ["hermes", "plain"])
@pytest.mark.parametrize("opening, thinking", [("<think>", False), ("", True), ("<think>a</think>\n<think>", False)])
def test_a_thought_that_does_not_end_has_neither_calls_nor_words(form, opening, thinking):
    text = f"{opening}It may be 4.\n{write_call(form, CALLS[0])}"
    assert parse_calls(form, text, TOOLS, thinking=thinking) == []
    assert without_calls(form, text, TOOLS, thinking=thinking) == ""
    assert parse_calls(form, f"{text}\n</think>\n{write_call(form, CALLS[1])}", TOOLS, thinking=thinking) == [CALLS[1]]


def test_what_is_no_character_becomes_one():
    (call,) = parse_calls("hermes", hermes(r'{"name": "python", "arguments": {"code": "\ud800"}}'), TOOLS)
    assert call.arguments == {"code": "?"}


def test_other_blocks_are_text():
    text = "So:\n```bash\nls\n```"
    assert parse_calls("plain", text, TOOLS) == []
    assert without_calls("plain", text, TOOLS) == text


@pytest.mark.parametrize(
    "form, text, problem",
    [
        ("hermes", "<tool_call>{}", "the call has no </tool_call>"),
        ("hermes", hermes("print(1)"), "the call is not JSON: Expecting value"),
        ("hermes", hermes("[" * 100_000), "the call is not JSON: "),
        ("hermes", hermes("[1]"), 'a call is {"name": ..., "arguments": {...}}'),
        ("hermes", hermes('{"name": "bash", "arguments": {}}'), "there is no tool 'bash'; the tools are: python, edit"),
        ("hermes", hermes('{"name": "python"}'), "the arguments of python are an object with 'code'"),
        ("hermes", hermes('{"name": "python", "arguments": "x"}'), "the arguments of python are an object with 'code'"),
        ("hermes", hermes('{"name": "python", "arguments": {"code": 1}}'), "'code' of python must be a text"),
        (
            "hermes",
            hermes(r'{"name": "python", "arguments": {"code": "\u0000"}}'),
            "'code' of python has a NUL character",
        ),
        ("plain", "```python\n\0\n```", "'code' of python has a NUL character"),
        ("plain", "```python\nprint(1)", "the block of python has no closing ```"),
        ("plain", "```edit\na.py\n```", "the block of edit must be a JSON object with 'path', 'text': "),
        ("plain", '```edit\n{"path": "a"}\n```', "the arguments of edit are an object with 'path', 'text'"),
    ],
)
def test_what_was_meant_as_a_call_is_explained(form, text, problem):
    (malformed,) = parse_calls(form, text, TOOLS)
    assert isinstance(malformed, Malformed)
    assert malformed.problem.startswith(problem)


def test_tools_are_described_in_a_way_that_reads_back():
    text = describe_tools("plain", TOOLS)
    assert {call.tool for call in parse_calls("plain", text, TOOLS)} == {"python", "edit"}
    lines = describe_tools("hermes", TOOLS).splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines if line.startswith('{"type"')] == ["python", "edit"]
    assert PYTHON.schema()["function"]["parameters"]["required"] == ["code"]


def test_observations_are_wrapped_as_the_format_has_it():
    assert write_observations("hermes", ["a", "b"]) == (
        "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    )
    assert write_observations("plain", ["a", "b"]) == "a\nb"
