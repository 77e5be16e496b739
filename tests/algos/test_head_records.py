import numpy as np
import pytest

from rlx.algos.head_records import head_problems

TOKENS, K = 5, 3


def record():
    """Heads of a sampler over 8 ids; tokens 0 and 3 are in theirs."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(TOKENS, 8))
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    order = np.argsort(-logprobs, -1).astype(np.int32)
    tokens = np.where(np.isin(np.arange(TOKENS), (0, 3)), order[:, 1], order[:, -1])
    ids = order[:, :K]
    return [ids, np.take_along_axis(logprobs, ids, -1), tokens, logprobs[np.arange(TOKENS), tokens]]


def test_a_sampler_s_head_passes():
    assert head_problems(*record()) == []


def twice(ids, logprobs, tokens, own):
    ids[2, 1] = ids[2, 0]


def infinite(ids, logprobs, tokens, own):
    logprobs[2, 1] = -np.inf


def heavy(ids, logprobs, tokens, own):
    logprobs[2] = np.log(0.4)


def shifted(ids, logprobs, tokens, own):
    logprobs[:] = np.roll(logprobs, 1, axis=0)


@pytest.mark.parametrize(
    "damage, said",
    [(twice, "id twice"), (infinite, "not finite"), (heavy, "mass is above 1"), (shifted, "a shift by a token")],
)
def test_what_is_wrong_is_said_once(damage, said):
    arrays = record()
    damage(*arrays)
    problems = head_problems(*arrays)
    assert len(problems) == 1
    assert said in problems[0]
    assert f"of {TOKENS} tokens" in problems[0]


def test_no_tokens_have_no_problems():
    assert head_problems(*(x[:0] for x in record())) == []
