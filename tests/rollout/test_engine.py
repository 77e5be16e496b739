"""What no engine should be sent, and what none should answer, is refused with the reason."""

import dataclasses

import numpy as np
import pytest

from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused, check_completion, check_request
from rlx.types import StopReason, TopK, VersionSpan

GOOD = Request("7:sums/3", np.arange(5, dtype=np.int32), seeds=(0, 2**32 - 1), max_new_tokens=1, temperature=0.0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_good_requests_pass(dtype):
    assert check_request(dataclasses.replace(GOOD, prompt=GOOD.prompt.astype(dtype)), 5, 6) is None


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt": np.zeros(0, np.int32)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros((1, 2), np.int32)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros(2)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros(6, np.int32)}, "a prompt of 6 tokens leaves no room in a context of 6. Raise engine"),
        ({"prompt": np.array([5], np.int32)}, r"token ids must be in \[0, 5\), got up to 5"),
        ({"prompt": np.array([-1], np.int32)}, r"token ids must be in \[0, 5\)"),
        ({"max_new_tokens": 0}, "at least one sample of at least one token"),
        ({"seeds": ()}, "at least one sample of at least one token"),
        ({"seeds": (1, 2**32)}, r"seeds must be in \[0, 2\*\*32\), got \(1, 4294967296\)"),
        ({"seeds": (-1,)}, r"seeds must be in \[0, 2\*\*32\)"),
        ({"temperature": -0.5}, "temperature -0.5 is not >= 0"),
        ({"temperature": float("nan")}, "temperature nan is not >= 0"),
    ],
)
def test_others_are_refused(change, said):
    with pytest.raises(RequestRefused, match=f"request 7:sums/3: .*{said}"):
        check_request(dataclasses.replace(GOOD, **change), vocab_size=5, context=6)


# ------------------------------------------------------------------------------------------------------------- answers

ASKED = dataclasses.replace(GOOD, max_new_tokens=3)
ANSWER = Completion(
    tokens=np.array([4, 0], np.int32),
    logprobs=np.log(np.array([0.5, 0.25], np.float32)),
    head=TopK(np.array([[4, 1], [2, 3]], np.int32), np.log(np.array([[0.5, 0.3], [0.4, 0.35]], np.float32))),
    version_spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)),
    stop_reason=StopReason.STOP,
)


def test_good_answers_pass():
    for answer in (ANSWER, dataclasses.replace(ANSWER, head=None)):
        assert check_completion(ASKED, answer) is None
    assert check_completion(dataclasses.replace(ASKED, max_new_tokens=2), ANSWER) is None


@pytest.mark.parametrize(
    "change, said",
    [
        ({"logprobs": ANSWER.logprobs[:1]}, r"log-probs of shape \(1,\) that are not 2 finite numbers"),
        ({"logprobs": np.array([-np.inf, -1], np.float32)}, "not 2 finite numbers"),
        ({"version_spans": ()}, "do not cover its 2 tokens"),
        ({"version_spans": (VersionSpan(3, 0, 1),)}, "do not cover its 2 tokens"),
        ({"version_spans": (VersionSpan(3, 0, 1), VersionSpan(4, 0, 2))}, "do not cover its 2 tokens"),
        ({"version_spans": (VersionSpan(3, 1, 2),)}, "do not cover its 2 tokens"),
        ({"head": TopK(ANSWER.head.ids, ANSWER.head.logprobs + np.float32(0.5))}, "a head whose mass is above 1"),
        ({"logprobs": ANSWER.logprobs[::-1]}, "not the one its head has for it"),
    ],
)
def test_other_answers_are_refused(change, said):
    with pytest.raises(EngineError, match=f"request 7:sums/3: the engine returned .*{said}"):
        check_completion(ASKED, dataclasses.replace(ANSWER, **change))


TWO = np.zeros((2, 2), np.int32), np.full((2, 2), -1.0, np.float32)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"tokens": ANSWER.tokens[:0]}, "empty"),
        ({"tokens": np.arange(4, dtype=np.int32)}, "length"),
        ({"tokens": np.array([4.0, 0.0])}, "tokens"),
        ({"tokens": np.array([4, -1])}, "tokens"),
        ({"logprobs": ANSWER.logprobs[:1]}, "short"),
        ({"logprobs": np.array([np.nan, -1], np.float32)}, "nonfinite"),
        ({"logprobs": np.array([-1, 0.01], np.float32)}, "logprobs"),
        ({"version_spans": ()}, "spans"),
        ({"head": TopK(TWO[0][:1], TWO[1][:1])}, "head"),
        ({"head": TopK(TWO[0], TWO[1][:, :1])}, "head"),
        ({"head": TopK(TWO[0][0], TWO[1][0])}, "head"),
        ({"head": TopK(*TWO)}, "head"),  # an id twice
    ],
)
def test_what_is_wrong_has_a_name_to_count_it_by(change, reason):
    with pytest.raises(EngineError) as caught:
        check_completion(ASKED, dataclasses.replace(ANSWER, **change))
    assert caught.value.reason == reason


def test_rounding_may_make_a_log_prob_slightly_positive():
    logprobs = np.array([1e-5, -1], np.float32)
    assert check_completion(ASKED, dataclasses.replace(ANSWER, logprobs=logprobs, head=None)) is None


@pytest.mark.parametrize("limit, count", [(1, 2), (3, 0)])
def test_answers_of_a_wrong_length_are_refused(limit, count):
    short = dataclasses.replace(ANSWER, tokens=ANSWER.tokens[:count])
    with pytest.raises(EngineError, match=f"returned {count} tokens, where 1 to {limit} were asked for"):
        check_completion(dataclasses.replace(ASKED, max_new_tokens=limit), short)
