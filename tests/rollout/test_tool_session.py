"""An environment of words behind token ids: calls, errors as observations, limits, what people read."""

import dataclasses
import itertools
import os

import numpy as np
import pytest

from rlx.config.chat import ChatConfig, ToolsConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import open_conversation
from rlx.envs.env import Step, Tool
from rlx.envs.grading import Grade, Outcome
from rlx.rollout import virtual
from rlx.rollout.engine import Completion
from rlx.rollout.session import play
from rlx.rollout.tool_session import ToolSession, in_bytes
from rlx.rollout.transcript import Transcript
from rlx.sandbox.base import PathError, SandboxError, WorkspaceError
from rlx.types import StopReason, VersionSpan
from tests.tiny_tokenizer import IM_END, build

PYTHON = Tool("python", "Runs a program", {"code": "the program"})
LIMITS = ToolsConfig(format="plain", max_turns=4, call_seconds=2.0, session_seconds=10.0, output_bytes=40)
CALL = "```python\n%s\n```"


class Script:
    """An `Env`: a program "prints" itself and takes a second; "enough" in a text ends the session."""

    tools = (PYTHON,)

    def __init__(self):
        self.actions, self.closed = [], 0

    async def reset(self):
        return "Go on."

    async def step(self, action):
        self.actions.append(action)
        if isinstance(action, str):
            return Step("What else?", done="enough" in action)
        return Step(action.arguments["code"], float(action.arguments["code"] == "2 + 2"), seconds=1.0)

    async def grade(self):
        return Grade(float(len(self.actions)), "", "", 0.0, Outcome.GRADED)

    async def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def conversation(tmp_path_factory):
    directory = build(tmp_path_factory.mktemp("tokenizer"))
    chat = load_chat_tokenizer(directory, "", "", ChatConfig("checkpoint", "off"))
    return open_conversation(chat, "plain", (PYTHON,))


def talk(conversation, responses, limits=LIMITS, limit=0, env=None):
    """(stop, verdict, environment, transcript, prompts) of a session in which the policy says `responses`."""
    env, transcript, prompts, said = env or Script(), Transcript(), [], iter(responses)
    session = ToolSession(env, conversation, limits)

    async def respond(transcript):
        prompts.append(transcript.tokens())
        text = next(said)
        ended = [] if text.endswith("...") else [IM_END]
        tokens = np.append(conversation.chat.encode(text), ended).astype(np.int32)
        reason = StopReason.STOP if ended else StopReason.LENGTH
        spans = (VersionSpan(0, 0, len(tokens)),)
        transcript.write(Completion(tokens, np.zeros(len(tokens), np.float32), None, spans, reason))

    async def main():
        stop = await play(session, transcript, respond, limit)
        verdict = await session.grade(transcript)
        await session.close()
        return stop, verdict

    stop, verdict = virtual.run(main())
    return verdict.stop_reason or stop, verdict, env, transcript, prompts


def test_calls_are_answered_and_a_text_may_end_it(conversation):
    stop, verdict, env, transcript, prompts = talk(conversation, [CALL % "2 + 2", "Hm.", "4, enough"])
    assert stop is StopReason.STOP
    assert [a if isinstance(a, str) else a.arguments["code"] for a in env.actions] == ["2 + 2", "Hm.", "4, enough"]
    assert env.closed == 1
    assert verdict.text == "```python\n2 + 2\n```\n\n[1] 2 + 2 (reward 1)\n\nHm.\n\n[2] What else?\n\n4, enough"
    for before, after in itertools.pairwise(prompts):
        np.testing.assert_array_equal(after[: len(before)], before)
    whole = conversation.chat.written_out(transcript.tokens())
    assert "(reward 1)" not in whole
    assert whole.endswith("4, enough<|im_end|>")


def test_malformed_calls_are_told(conversation):
    stop, verdict, env, *_ = talk(conversation, ["```python\nprint(1)", "enough"])
    assert stop is StopReason.STOP
    assert env.actions == ["enough"]
    assert "[1] Error: the block of python has no closing ```" in verdict.text


def test_several_calls_of_a_response_are_run_in_order(conversation):
    text = "\n".join([CALL % "a", CALL % "b"])
    _, verdict, env, *_ = talk(conversation, [text, "enough"])
    assert [getattr(a, "arguments", a) for a in env.actions] == [{"code": "a"}, {"code": "b"}, "enough"]
    assert "[1] a\n\n[1] b" in verdict.text


@pytest.mark.parametrize(
    "change, responses, stop, actions",
    [
        ({"max_turns": 2}, [CALL % "a", CALL % "b"], StopReason.TURN_LIMIT, 2),
        ({"session_seconds": 1.5}, [CALL % "a", CALL % "b"], StopReason.TOOL_LIMIT, 2),
        ({"session_seconds": 1.0}, ["\n".join([CALL % "a", CALL % "b"])], StopReason.TOOL_LIMIT, 1),
        ({}, [CALL % "a", "4 is..."], StopReason.LENGTH, 2),
        ({}, [CALL % "a", CALL[:-3] % "b" + "..."], StopReason.LENGTH, 2),
    ],
)
def test_limits_end_a_session_which_is_graded_on_its_work_so_far(conversation, change, responses, stop, actions):
    got, verdict, env, *_ = talk(conversation, responses, dataclasses.replace(LIMITS, **change))
    assert got is stop
    assert len(env.actions) == actions
    assert verdict.grade.reward == actions


def test_a_session_at_its_token_limit_is_graded_on_its_work_so_far(conversation):
    stop, verdict, _, _, prompts = talk(conversation, [CALL % "a"], limit=len(conversation.opening("Go on.")) + 1)
    assert stop is StopReason.SESSION_LIMIT
    assert verdict.grade.reward == 1.0
    assert len(prompts) == 1


def test_long_outputs_lose_their_middle(conversation):
    assert in_bytes("short", 40) == "short"
    text = in_bytes("a" * 30 + "é" * 30 + "z" * 30, 40)
    assert text.startswith("a" * 20 + "\n... 80 bytes left out ...\n")
    assert text.endswith("z" * 20)
    _, verdict, *_ = talk(conversation, [CALL % ("x" * 100), "enough"])
    assert "... 60 bytes left out ..." in verdict.text


class Broken(Script):
    """Whatever is run raises `error`."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    async def step(self, action):
        if isinstance(action, str):
            return await super().step(action)
        raise self.error


@pytest.mark.parametrize("error", [PathError("program.py is no file"), WorkspaceError("there is no room")])
def test_what_the_policy_made_of_its_workspace_is_told_and_no_failure(conversation, error):
    stop, verdict, *_ = talk(conversation, [CALL % "a", "enough"], env=Broken(error))
    assert stop is StopReason.STOP
    assert f"[1] Error: {error}" in verdict.text
    assert verdict.grade.outcome == Outcome.GRADED


def test_a_sandbox_that_fails_is_a_failure(conversation):
    with pytest.raises(SandboxError, match="gone"):
        talk(conversation, [CALL % "a"], env=Broken(SandboxError("gone")))


def test_names_that_are_no_text_can_be_told(conversation):
    class Lists(Script):
        async def step(self, action):
            return Step(os.fsdecode(b"\xff.txt")) if not isinstance(action, str) else await super().step(action)

    _, verdict, *_ = talk(conversation, [CALL % "a", "enough"], env=Lists())
    assert "[1] ?.txt" in verdict.text


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("begun, thought", [(True, ""), (False, "<think>\n")])
def test_a_thought_that_does_not_end_says_and_does_nothing(conversation, begun, thought, ended):
    thinking = dataclasses.replace(conversation, thinking=begun)
    response = f"{thought}It is 4, enough.\n{CALL % 'a'}" + ("" if ended else "...")
    stop, _, env, *_ = talk(thinking, [response, "</think>enough"])
    assert stop is (StopReason.STOP if ended else StopReason.LENGTH)
    assert env.actions == ["", "enough"][: 1 + ended]
