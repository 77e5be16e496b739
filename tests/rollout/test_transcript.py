"""Token ids, masks, log-probs, heads and versions over turns, whole or in parts."""

import dataclasses

import numpy as np
import pytest

from rlx.envs.grading import Grade, Outcome
from rlx.rollout.engine import Completion
from rlx.rollout.records import pack, unpack
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task, TopK, VersionSpan

TASK = Task("sums/0", "sums", "1+1", "2", "number")
VERDICT = Verdict(Grade(1.0, "2", "", 0.1, Outcome.GRADED), "two")


def part(first: int, count: int, spans, stop=StopReason.STOP, head=2) -> Completion:
    tokens = np.arange(first, first + count, dtype=np.int32)
    ids = np.stack([tokens + k for k in range(head)], axis=1) if head else None
    top = TopK(ids, (-1.0 - ids).astype(np.float32)) if head else None
    spans = tuple(VersionSpan(*s) for s in spans)
    return Completion(tokens, -tokens.astype(np.float32), top, spans, stop)


def conversation() -> Transcript:
    """Two words, a response in two parts of two engines, three words, a response, one word."""
    transcript = Transcript()
    transcript.observe(np.array([1, 2], np.int64))
    transcript.write(part(10, 2, [(5, 0, 2)], StopReason.ABORT))
    transcript.write(part(12, 3, [(5, 0, 1), (6, 1, 3)]))
    transcript.observe(np.array([3, 4, 5], np.int32))
    transcript.write(part(20, 2, [(6, 0, 2)], StopReason.LENGTH))
    transcript.observe(np.array([7], np.int32))
    return transcript


def sample_of(transcript, **changes):
    stop = changes.pop("stop", transcript.stop_reason)
    return transcript.sample(TASK, 3, 1, VERDICT, stop, **({"zero_truncated": False} | changes))


def test_everything_is_at_its_tokens_own_place():
    sample = sample_of(conversation())
    written = [10, 11, 12, 13, 14, 20, 21]
    np.testing.assert_array_equal(sample.tokens, [1, 2, 10, 11, 12, 13, 14, 3, 4, 5, 20, 21])
    np.testing.assert_array_equal(sample.mask, [t >= 10 for t in sample.tokens])
    np.testing.assert_array_equal(sample.logprobs, [-t if t >= 10 else 0 for t in sample.tokens])
    np.testing.assert_array_equal(sample.head.ids, [[t, t + 1] for t in written])
    np.testing.assert_array_equal(sample.head.logprobs, -1 - sample.head.ids)
    assert (sample.tokens.dtype, sample.logprobs.dtype, sample.mask.dtype) == (np.int32, np.float32, bool)
    assert (sample.task, sample.group, sample.index, sample.text, sample.reward) == (TASK, 3, 1, "two", 1.0)


def test_spans_go_over_the_sample_and_join_where_the_version_stays():
    spans = [dataclasses.astuple(s) for s in conversation().version_spans()]
    assert spans == [(5, 2, 5), (6, 5, 7), (6, 10, 12)]


def test_what_comes_after_the_last_response_is_not_part_of_the_sample():
    transcript = conversation()
    assert (transcript.length, transcript.num_written) == (13, 7)
    assert len(sample_of(transcript).tokens) == 12


def test_a_response_is_open_until_a_part_ends_it():
    transcript = Transcript()
    assert not transcript.answered
    transcript.observe(np.array([1]))
    assert not transcript.answered
    transcript.write(part(10, 2, [(0, 0, 2)], StopReason.ABORT))
    assert not transcript.answered
    assert transcript.stop_reason is StopReason.ABORT
    transcript.write(part(12, 1, [(0, 0, 1)]))
    assert transcript.answered
    np.testing.assert_array_equal(transcript.turns[0].response(), [10, 11, 12])
    np.testing.assert_array_equal(transcript.tokens(), [1, 10, 11, 12])


@pytest.mark.parametrize("heads", [(0, 0), (2, 0), (0, 2)])
def test_a_head_is_there_for_all_written_tokens_or_not_at_all(heads):
    transcript = Transcript()
    for head in heads:
        transcript.observe(np.array([1]))
        transcript.write(part(10, 2, [(0, 0, 2)], head=head))
    assert transcript.head() is None


def test_one_response_keeps_its_arrays():
    """A head is most of a sample's memory: it is not copied."""
    transcript, answer = Transcript(), part(10, 2, [(0, 0, 2)])
    transcript.observe(np.array([1]))
    transcript.write(answer)
    assert sample_of(transcript).head.ids is answer.head.ids
    assert sample_of(transcript).head.logprobs is answer.head.logprobs


@pytest.mark.parametrize(
    "stop, zeroed, reward",
    [(StopReason.LENGTH, True, 0.0), (StopReason.LENGTH, False, 1.0), (StopReason.SESSION_LIMIT, True, 1.0)],
)
def test_only_a_cut_response_is_given_no_reward(stop, zeroed, reward):
    """A session at its limit is graded on its work so far."""
    sample = sample_of(conversation(), stop=stop, zero_truncated=zeroed)
    assert (sample.reward, sample.stop_reason, sample.grade["reward"]) == (reward, stop, 1.0)


def test_it_comes_back_from_bytes():
    transcript = conversation()
    again = Transcript.from_state(unpack(pack(transcript.get_state())))
    assert (again.length, again.num_written, again.answered) == (13, 7, False)
    one, other = sample_of(transcript), sample_of(again)
    for name in ("tokens", "mask", "logprobs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.head.ids, other.head.ids)
    assert (one.version_spans, one.stop_reason) == (other.version_spans, other.stop_reason)
    assert len(again.turns[0].parts) == 2
