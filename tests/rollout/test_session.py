"""Sessions of one turn and of several: limits, going on after an interruption, environments that fail."""

import asyncio
import itertools

import numpy as np
import pytest

from rlx.envs.grading import Grade, Outcome
from rlx.rollout import virtual
from rlx.rollout.limits import abandon, bounded
from rlx.rollout.session import EnvironmentFailed, Guarded, TaskEnvironment, play, questions
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task
from tests.rollout.scripted import Conversation, Graders, Tokenizer
from tests.rollout.test_transcript import part

TASK = Task("talk/0", "talk", "abcde", "", "exact")


def talk(environment, transcript=None, limit=0, length=4):
    """(why it ended, transcript, the prompts that the policy saw)."""
    transcript, prompts = transcript or Transcript(), []

    async def respond(transcript):
        prompts.append(transcript.tokens())
        transcript.write(part(10 * len(transcript.turns), length, [(0, 0, length)]))

    return virtual.run(play(environment, transcript, respond, limit)), transcript, prompts


def test_a_question_is_one_turn():
    stop, transcript, prompts = talk(TaskEnvironment(TASK, Graders(), Tokenizer()))
    assert (stop, len(transcript.turns), transcript.length) == (StopReason.STOP, 1, 9)
    np.testing.assert_array_equal(prompts[0], [ord(c) for c in "abcde"])


def test_samples_of_a_group_have_one_prompt_that_none_of_them_can_change():
    encoded = []

    class Counts(Tokenizer):
        def encode_prompt(self, question):
            encoded.append(question)
            return super().encode_prompt(question)

    environments = questions(Graders(), Counts())
    first, second = (virtual.run(environments(TASK).reset()) for _ in range(2))
    assert encoded == ["abcde"]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0
    np.testing.assert_array_equal(second, [ord(c) for c in "abcde"])


def test_the_policy_sees_every_turn_before():
    stop, transcript, prompts = talk(Conversation(TASK, turns=3))
    assert (stop, len(transcript.turns)) == (StopReason.STOP, 3)
    assert [len(p) for p in prompts] == [5, 5 + 4 + 3, 5 + 2 * (4 + 3)]
    for before, after in itertools.pairwise(prompts):
        np.testing.assert_array_equal(after[: len(before)], before)
    np.testing.assert_array_equal(prompts[2], transcript.tokens()[: len(prompts[2])])


@pytest.mark.parametrize(
    "limit, turns, stop",
    [
        (12, 1, StopReason.SESSION_LIMIT),  # a second turn would begin at 12 tokens
        (13, 2, StopReason.SESSION_LIMIT),
        (19, 2, StopReason.SESSION_LIMIT),
        (20, 3, StopReason.STOP),
        (5, 0, StopReason.SESSION_LIMIT),
    ],
)
def test_no_turn_begins_at_the_limit(limit, turns, stop):
    """The last turn may go beyond: engines have room for it."""
    got, _, prompts = talk(Conversation(TASK, turns=3), limit=limit)
    assert (got, len(prompts)) == (stop, turns)
    assert all(len(p) < limit for p in prompts)


def test_a_session_goes_on_from_its_transcript():
    _, whole, _ = talk(Conversation(TASK, turns=3))
    for turns in (1, 2):
        for answered in (False, True):
            state = whole.get_state()[:turns]
            if not answered:
                state[-1] = {**state[-1], "parts": []}
            stop, again, prompts = talk(Conversation(TASK, turns=3), Transcript.from_state(state))
            assert stop is StopReason.STOP
            assert len(prompts) == 3 - turns + (not answered)
            np.testing.assert_array_equal(again.tokens(), whole.tokens())


def test_an_open_response_is_finished_also_beyond_the_limit():
    transcript = Transcript()
    transcript.observe(np.array([ord(c) for c in "abcde"]))
    transcript.write(part(10, 9, [(0, 0, 9)], StopReason.ABORT))
    stop, transcript, prompts = talk(Conversation(TASK, turns=1), transcript, limit=10)
    assert (stop, len(prompts), transcript.num_written) == (StopReason.STOP, 1, 13)


def test_an_environment_that_says_something_else_now_cannot_go_on():
    _, whole, _ = talk(Conversation(TASK, turns=3, words=2))
    with pytest.raises(EnvironmentFailed, match="not those") as caught:
        talk(Conversation(TASK, turns=3, words=3), Transcript.from_state(whole.get_state()[:2]))
    assert caught.value.reason == "environment_replay"


# ----------------------------------------------------------------------------------------------- guarded environments


class Broken(Conversation):
    """Says or grades what `said` is."""

    def __init__(self, said):
        super().__init__(TASK)
        self.said = said

    async def reset(self):
        return self.said

    async def grade(self, transcript):
        return self.said


@pytest.mark.parametrize(
    "call, fault, reason",
    [
        ("reset", "hangs", "environment_timeout"),
        ("reset", "raises", "environment_error"),
        ("step", "hangs", "environment_timeout"),
        ("step", "raises", "environment_error"),
        ("grade", "hangs", "grader_timeout"),
        ("grade", "raises", "grader_error"),
    ],
)
def test_every_call_ends_in_an_answer_or_a_named_failure(call, fault, reason):
    async def main():
        environment = Guarded(Conversation(TASK, faults=lambda c: fault if c == call else None), limit_s=2.0)
        argument = {"reset": [], "step": [np.array([1])], "grade": [Transcript()]}[call]
        with pytest.raises(EnvironmentFailed) as caught:
            await getattr(environment, call)(*argument)
        return caught.value.reason, asyncio.get_running_loop().time()

    got, seconds = virtual.run(main())
    assert got == reason
    assert seconds == pytest.approx(2.0 if fault == "hangs" else 0.03)


@pytest.mark.parametrize("said", [None, "text", np.zeros((2, 2), np.int32), np.zeros(2), [1, 2]])
def test_words_that_are_no_token_ids_are_refused(said):
    with pytest.raises(EnvironmentFailed, match="must return 1-D token ids") as caught:
        virtual.run(Guarded(Broken(said), 1.0).reset())
    assert caught.value.reason == "environment_nonsense"


@pytest.mark.parametrize(
    "said", [None, 1.0, Verdict(Grade(float("nan"), "", "", 0.0, Outcome.GRADED), ""), Verdict(1.0, "")]
)
def test_grades_that_are_none_are_refused(said):
    with pytest.raises(EnvironmentFailed) as caught:
        virtual.run(Guarded(Broken(said), 1.0).grade(Transcript()))
    assert caught.value.reason == "grader_nonsense"


def test_work_that_ignores_being_cancelled_is_left_alone():
    ended = []

    async def deaf():
        for _ in range(3):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                continue
        return "late"

    async def main():
        with pytest.raises(TimeoutError, match="not done within 1 s"):
            await bounded(deaf(), 1.0, late=lambda task: ended.append(task.result()))
        assert asyncio.get_running_loop().time() == 1.0
        await asyncio.sleep(20)

    virtual.run(main())
    assert ended == ["late"]


def test_work_that_cancels_itself_is_an_error_of_its_own():
    async def gives_up():
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from inside"):
        virtual.run(bounded(gives_up(), 1.0))


def test_whoever_waits_can_be_cancelled_and_takes_the_work_along():
    seen = []

    async def work():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main():
        task = asyncio.create_task(bounded(work(), 5.0))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    virtual.run(main())
    assert seen == ["cancelled"]


def test_errors_of_abandoned_work_are_taken_note_of(caplog):
    async def fails():
        try:
            await asyncio.sleep(10)
        finally:
            raise OSError("in vain")

    async def main():
        task = asyncio.create_task(fails())
        await asyncio.sleep(1)
        abandon(task)
        await asyncio.sleep(1)

    virtual.run(main())
    assert "never retrieved" not in caplog.text
