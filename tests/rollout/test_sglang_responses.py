"""What an SGLang server must not have answered, each with the name it is counted by."""

from __future__ import annotations

import base64
import copy

import numpy as np
import orjson
import pytest

from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_requests import Limits, generate_body
from rlx.rollout.sglang_responses import Asked, parse_completion, parse_score
from rlx.types import StopReason, VersionSpan
from tests.rollout.sglang_server import HEAD, STOP, VOCAB, answer, ask, flat

REQUEST, RID = ask(), "f" * 32
VALUES = "output_top_logprobs_val_flat_b64"


def good() -> dict:
    return answer(orjson.loads(generate_body(REQUEST, 0, RID, Limits(VOCAB, 64, HEAD, (STOP,)), None)))


def parse(value, version: int | None = None):
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return parse_completion(body, Asked(REQUEST, RID, 3, 5, VOCAB, HEAD, (STOP,), version))


def test_a_good_answer():
    completion = parse(good())
    assert completion.tokens.tolist() == good()["output_ids"]
    assert completion.tokens.dtype == np.int32
    assert completion.head.ids.shape == (5, HEAD)
    assert completion.stop_reason is StopReason.LENGTH
    np.testing.assert_array_equal(completion.head.logprobs[:, 1], completion.logprobs)
    assert completion.version_spans == (VersionSpan(3, 0, 5),)


def test_an_adapter_s_version_is_the_one_that_was_asked_for():
    assert parse(good(), version=9).version_spans == (VersionSpan(9, 0, 5),)


def test_the_three_forms_of_heads_are_the_same():
    wanted = parse(good()).head
    lists, nested = good(), good()
    meta, rows = lists["meta_info"], range(5)
    for kind, array in (("val", wanted.logprobs), ("idx", wanted.ids)):
        del meta[f"output_top_logprobs_{kind}_flat_b64"]
        meta[f"output_top_logprobs_{kind}_flat"] = array.ravel().tolist()
    pairs = [[[float(wanted.logprobs[i, k]), int(wanted.ids[i, k]), None] for k in range(HEAD)] for i in rows]
    nested["meta_info"] = {k: v for k, v in meta.items() if "top" not in k} | {"output_top_logprobs": pairs}
    for other in (parse(lists).head, parse(nested).head):
        np.testing.assert_array_equal(other.ids, wanted.ids)
        np.testing.assert_array_equal(other.logprobs, wanted.logprobs)


def backwards(head: str) -> str:
    return flat(np.frombuffer(base64.b64decode(head), np.float32).reshape(5, HEAD)[:, ::-1].copy())


FAULTS = {
    "mixed": lambda a, m: m.update(id="0" * 32),
    "prompt": lambda a, m: m.update(prompt_tokens=4),
    "tokens": lambda a, m: a["output_ids"].__setitem__(2, VOCAB),
    "short": lambda a, m: m["output_token_logprobs"].pop(),
    "shifted": lambda a, m: m.update(output_token_logprobs=m["output_token_logprobs"][1:] + [[-1.0, 0, None]]),
    "nonfinite": lambda a, m: m["output_token_logprobs"][2].__setitem__(0, None),
    "logprobs": lambda a, m: m["output_token_logprobs"][2].__setitem__(0, 0.5),
    "head": lambda a, m: m.update(output_top_logprobs_shape=[4, HEAD]),
    "head_order": lambda a, m: m.update({VALUES: backwards(m[VALUES])}),
    "spans": lambda a, m: m["weight_versions"][0].update(end=4),
    "version": lambda a, m: m["weight_versions"][0].update(version="default"),
    "malformed": lambda a, m: a.pop("meta_info"),
    "stop": lambda a, m: m.update(finish_reason={"type": "stop", "matched": 1}),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_faults_are_refused_by_name(reason):
    value = copy.deepcopy(good())
    FAULTS[reason](value, value["meta_info"])
    with pytest.raises(EngineError) as refused:
        parse(value)
    assert refused.value.reason == reason


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"meta_info": {}}'])
def test_what_is_no_answer_at_all(body):
    with pytest.raises(EngineError) as refused:
        parse(body)
    assert refused.value.reason == "malformed"


def test_heads_of_the_next_token_and_heads_with_an_id_twice():
    key = "output_top_logprobs_{}_flat_b64"
    ids = parse(good()).head.ids
    shift, twice = good(), good()
    shift["meta_info"] |= {
        key.format("idx"): flat(np.roll(ids, 1, 0)),
        key.format("val"): flat(np.roll(parse(good()).head.logprobs, 1, 0)),
    }
    repeated = ids.copy()
    repeated[:, 3] = repeated[:, 2]
    twice["meta_info"][key.format("idx")] = flat(repeated)
    for value, said in ((shift, "a shift"), (twice, "an id twice")):
        with pytest.raises(EngineError, match=said):
            parse(value)


def test_an_abort_before_the_first_token_is_no_completion():
    value = good() | {"output_ids": []}
    value["meta_info"] |= {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    assert parse(value) is None


def scored(last: int) -> tuple[bytes, np.ndarray]:
    tokens = np.array([1, 2, 3, last], np.int32)
    named = 0 if last == VOCAB - 1 else last
    triples = [[None, 2, None], [-1.0, 3, None], [-2.0, named, None]]
    return orjson.dumps(
        {"output_ids": [], "meta_info": {"id": RID, "weight_version": "3", "input_token_logprobs": triples}}
    ), tokens


@pytest.mark.parametrize("last", [5, VOCAB - 1])
def test_scores_also_of_the_last_id_that_the_server_calls_0(last):
    body, tokens = scored(last)
    assert parse_score(body, tokens, 2, 0, VOCAB, RID).logprobs.tolist() == [-1.0, -2.0]


def test_scores_of_other_tokens_are_refused():
    body, tokens = scored(5)
    with pytest.raises(EngineError, match="the log-prob at token 1 is of id 5, the token has id 6"):
        parse_score(body, np.array([*tokens[:3], 6]), 2, 0, VOCAB, RID)
