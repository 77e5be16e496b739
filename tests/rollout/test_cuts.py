"""Cut points: recorded in a pass, stored by content, played again, and sessions that start at them."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx import cuts as program
from rlx.config.chat import ToolsConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import open_conversation
from rlx.envs.cut_index import read_index
from rlx.envs.env import Step, Tool, ToolCall
from rlx.envs.grading import Grade, Outcome
from rlx.envs.tool_calls import write_call
from rlx.rollout import cuts
from rlx.rollout.cuts import Cut, CutRefused, CutSession, CutStore, RecordedSession
from rlx.rollout.engine import Completion
from rlx.rollout.session import play
from rlx.rollout.tool_session import ToolSession
from rlx.rollout.transcript import Transcript
from rlx.sandbox.files import pack, unpack
from rlx.types import StopReason, Task, VersionSpan
from tests import tiny_tokenizer
from tests.workshop import LIMITS

WRITE = Tool("write", "Writes a line", {"text": "the line"})
TASK = Task("lines/0", "lines", "Write one line a step.", None, "lines")
LIMITS_OF_TOOLS = ToolsConfig("hermes", 8, 10.0, 100.0, 1000)
PRINT = "tokenizer"


class Lines:
    """Three steps, each of one line in a file; the workspace is a directory. salt: what a tool says beside."""

    tools = (WRITE,)

    def __init__(self, directory, salt="", stray=""):
        self.directory, self.salt, self.stray = directory, salt, stray
        self.step_number = 0
        self.closed = False

    async def reset(self):
        self.directory.mkdir()
        return TASK.question

    async def step(self, action):
        if isinstance(action, ToolCall):
            with (self.directory / "lines.txt").open("a") as file:
                file.write(action.arguments["text"] + self.stray + "\n")
            return Step(f"written{self.salt}", seconds=0.1)
        self.step_number += 1
        return Step(f"Step {self.step_number + 1}", done=self.step_number == 3)

    async def grade(self):
        lines = (self.directory / "lines.txt").read_text().split()
        return Grade(float(lines == ["a", "b", "c"]), "", " ".join(lines), 0.0, Outcome.GRADED)

    async def snapshot(self):
        return pack(str(self.directory), LIMITS)

    async def resume(self, step, snapshot):
        self.step_number = step
        self.directory.mkdir()
        unpack(str(self.directory), snapshot)

    async def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def conversation(tmp_path_factory):
    chat = load_chat_tokenizer(tiny_tokenizer.build(tmp_path_factory.mktemp("tokenizer")), "", "")
    return open_conversation(chat, "hermes", (WRITE,))


def said(conversation, *texts):
    """Responses: calls for texts of one letter, words otherwise."""
    chat = conversation.chat
    written = [write_call("hermes", ToolCall("write", {"text": t})) if len(t) == 1 else t for t in texts]
    return [np.append(chat.encode(text), chat.end_of_turn_id).astype(np.int32) for text in written]


def session(conversation, env):
    return ToolSession(env, conversation, LIMITS_OF_TOOLS)


def recorded(conversation, directory, *texts):
    env = Lines(directory)
    made = RecordedSession(session(conversation, env), env, TASK, PRINT)
    return asyncio.run(cuts.record(made, said(conversation, *texts)))


@pytest.fixture
def passed(conversation, tmp_path):
    return recorded(conversation, tmp_path / "pass", "a", "done", "b", "done", "c", "done")


def continue_from(conversation, env, cut, *texts):
    """(why it ended, its transcript, its verdict) of a session from a cut."""
    responses = iter(said(conversation, *texts))

    async def respond(transcript):
        tokens = next(responses)
        spans = (VersionSpan(0, 0, len(tokens)),)
        transcript.write(Completion(tokens, -np.ones(len(tokens), np.float32), None, spans, StopReason.STOP))

    async def main():
        started, transcript = CutSession(session(conversation, env), env, cut), Transcript()
        stop = await play(started, transcript, respond, 0)
        return stop, transcript, await started.grade(transcript)

    return asyncio.run(main())


def test_a_pass_gives_a_cut_for_each_step_but_the_first(conversation, passed):
    assert [cut.step for cut in passed] == [1, 2]
    text = conversation.chat.written_out(passed[1].tokens)
    assert text.count("written") == 2
    assert "Step 3" in text.rpartition("<|im_start|>user")[2]
    np.testing.assert_array_equal(passed[1].tokens[: len(passed[0].tokens)], passed[0].tokens)


def test_what_does_not_pass_is_not_kept(conversation, tmp_path):
    with pytest.raises(CutRefused, match=r"no pass: reward 0 \(a b x\)"):
        recorded(conversation, tmp_path / "one", "a", "done", "b", "done", "x", "done")
    with pytest.raises(CutRefused, match="over after 6 of 7"):
        recorded(conversation, tmp_path / "two", "a", "done", "b", "done", "c", "done", "more")


def test_a_session_starts_at_a_cut_and_is_trained_on_its_own_words_alone(conversation, passed, tmp_path):
    env = Lines(tmp_path / "again")
    stop, transcript, verdict = continue_from(conversation, env, passed[1], "c", "done")
    assert (stop, verdict.grade.reward) == (StopReason.STOP, 1.0)
    sample = transcript.sample(TASK, 0, 0, verdict, stop, zero_truncated=False)
    before = len(passed[1].tokens)
    assert not sample.mask[:before].any()
    written = conversation.chat.written_out(sample.tokens[sample.mask])
    assert '"text": "c"' in written
    assert '"text": "a"' not in written


def test_cuts_are_named_by_their_content_and_come_back_as_they_were(passed, tmp_path):
    store = CutStore(tmp_path / "cuts")
    digests = [store.put(cut) for cut in passed]
    assert [store.put(cut) for cut in passed] == digests
    assert {path.name for path in store.directory.iterdir()} == {*(f"{d}.cut" for d in digests), "index.json"}
    assert read_index(store.directory) == {d: ("lines/0", i + 1) for i, d in enumerate(digests)}
    for (digest, back), cut in zip(store, passed):
        assert digest == digests[cut.step - 1]
        np.testing.assert_array_equal(back.tokens, cut.tokens)
        assert (back.task, back.step, back.snapshot, back.tokenizer) == (cut.task, cut.step, cut.snapshot, PRINT)


def test_a_damaged_or_missing_cut_is_refused(passed, tmp_path):
    store = CutStore(tmp_path)
    digest = store.put(passed[0])
    path = tmp_path / f"{digest}.cut"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CutRefused, match=r"is damaged.*delete it"):
        store.get(digest)
    whole = store.put(passed[1])
    found, problems = store.readable()
    assert [name for name, _ in found] == [whole]
    assert [digest in problem for problem in problems] == [True]
    with pytest.raises(CutRefused, match="is damaged"):
        list(store)
    assert program.main(["list", f"--cuts={tmp_path}"]) == 1
    with pytest.raises(CutRefused, match="there is no cut"):
        store.get("0" * 64)


def verify(conversation, cut, env, tokenizer=PRINT):
    asyncio.run(cuts.verify(cut, session(conversation, env), env, tokenizer))
    return env


def test_a_cut_that_plays_again_is_verified_and_its_sandbox_closed(conversation, passed, tmp_path):
    assert verify(conversation, passed[1], Lines(tmp_path / "again")).closed


@pytest.mark.parametrize(
    "changes, tokenizer, why",
    [
        ({"salt": " at noon"}, PRINT, "another observation came before response 2 of 4"),
        ({"stray": "?"}, PRINT, "the workspace is another one"),
        ({}, "another", "another tokenizer"),
    ],
)
def test_a_cut_that_does_not_play_again_is_refused_by_name(conversation, passed, tmp_path, changes, tokenizer, why):
    env = Lines(tmp_path / "again", **changes)
    with pytest.raises(CutRefused, match=rf"lines/0, step 3.*{why}"):
        verify(conversation, passed[1], env, tokenizer)


def test_a_cut_whose_session_would_have_been_over_is_refused(conversation, passed, tmp_path):
    long = dataclasses.replace(
        passed[1],
        observations=(*passed[1].observations, passed[1].observations[-1]),
        responses=(*passed[1].responses, *said(conversation, "done")),
    )
    with pytest.raises(CutRefused, match="the session was over"):
        verify(conversation, long, Lines(tmp_path / "again"))


def test_every_field_of_a_cut_is_stored(passed, tmp_path):
    assert {field.name for field in dataclasses.fields(Cut)} == set(cuts._tree(passed[0]))


def test_an_index_of_another_version_is_refused(tmp_path):
    (tmp_path / "index.json").write_text('{"abc": {"project": "lines", "step": 1}}')
    with pytest.raises(ValueError, match="record the cuts again"):
        read_index(tmp_path)
