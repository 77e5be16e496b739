"""The SGLang client against a real server: exact log-probs, heads, spans, scores, aborts, and what is never sent."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from rlx.probing import Policy, rows
from rlx.rollout import sglang
from rlx.rollout.engine import EngineError, Request, RequestRefused
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server
from rlx.rollout.sglang_requests import HeadForm, Limits
from rlx.types import StopReason, VersionSpan
from tests import tiny_model, tiny_tokenizer
from tests.sglang.trainer import PATIENCE_S, write_along

pytestmark = pytest.mark.sglang
HEAD, CONTEXT = 16, 256
LIMITS = Limits(tiny_model.ARCH.vocab_size, CONTEXT, HEAD)
POLICY = Policy("served", tiny_model.ARCH, tiny_model.params(), 0)


async def no_load(*_) -> None:
    raise AssertionError("nothing is to be loaded here")


def run[T](server, scenario: Callable[[SglangEngine], Awaitable[T]], limits: Limits = LIMITS, **options) -> T:
    """What the scenario makes of an engine on the server."""

    async def main() -> T:
        address = Server(server.url, server.api_key, server.admin_key)
        engine = SglangEngine(address, SglangOptions(limits, **{"parse_processes": 0} | options), no_load)
        try:
            return await asyncio.wait_for(scenario(engine), PATIENCE_S)
        finally:
            await engine.close()

    return asyncio.run(main())


def ask(samples: int = 1, new: int = 12, temperature: float = 1.0, length: int = 7, number: int = 0) -> Request:
    prompt = np.random.default_rng(number).integers(4, LIMITS.vocab_size, length).astype(np.int32)
    return Request(f"ask {number}", prompt, tuple(range(samples)), new, temperature)


def expected(request: Request, tokens: np.ndarray):
    whole = np.concatenate([request.prompt, tokens])
    made = rows(POLICY, whole, request.temperature or 1.0)
    return type(made)(*(x[len(request.prompt) - 1 :] for x in made))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_heads_are_the_policy_s(server, temperature):
    request = ask(3, temperature=temperature)
    done = run(server, lambda engine: engine.generate(request))
    assert [len(c.tokens) for c in done] == [12, 12, 12]
    for completion in done:
        wanted = expected(request, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, wanted.logprob, atol=1e-4)
        np.testing.assert_allclose(completion.head.logprobs, wanted.top[:, :HEAD], atol=1e-4)
        assert completion.version_spans == (VersionSpan(0, 0, 12),)
        assert completion.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("form", ["base64", "flat", "nested"])
def test_greedy_answers_are_the_same_in_every_form_of_heads_and_in_another_process(server, form: HeadForm):
    request = ask(temperature=0.0)
    limits = dataclasses.replace(LIMITS, head_form=form)
    here = run(server, lambda engine: engine.generate(request), limits)[0]
    there = run(server, lambda engine: engine.generate(request), limits, parse_processes=1, parse_bytes=0)[0]
    np.testing.assert_array_equal(here.tokens, there.tokens)
    np.testing.assert_allclose(here.head.logprobs, there.head.logprobs, atol=1e-5)
    np.testing.assert_allclose(here.logprobs, expected(request, here.tokens).logprob, atol=1e-4)


def test_a_response_ends_with_its_first_stop_token(server):
    limits = dataclasses.replace(LIMITS, stop_ids=(tiny_tokenizer.END_OF_TEXT, *range(100, 140)))
    done = run(server, lambda engine: engine.generate(ask(8, new=200)), limits)
    ended = [c for c in done if c.stop_reason is StopReason.STOP]
    assert ended
    assert all(np.isin(c.tokens, limits.stop_ids).sum() == 1 for c in ended)


@pytest.mark.parametrize("start", [1, 4])
def test_given_tokens_are_scored_with_the_last_id_of_the_vocabulary_among_them(server, start):
    tokens = np.array([5, 9, LIMITS.vocab_size - 1, 200, 17, 17, 3, LIMITS.vocab_size - 1], np.int32)
    scored = run(server, lambda engine: engine.score([tokens, tokens[:5]], start, HEAD))
    wanted = rows(POLICY, tokens, 1.0)
    np.testing.assert_allclose(scored[0].logprobs, wanted.logprob[start - 1 :], atol=1e-4)
    np.testing.assert_allclose(scored[0].head.logprobs, wanted.top[start - 1 :, :HEAD], atol=1e-4)
    np.testing.assert_allclose(scored[1].logprobs, wanted.logprob[start - 1 : 4], atol=1e-4)
    assert scored[0].version == 0


def test_cancelling_returns_what_was_written_and_leaves_other_requests_alone(server, monkeypatch):
    monkeypatch.setattr(sglang, "ABORT_S", 60.0)  # a busy machine needs longer, and is not what this is about

    async def scenario(engine):
        other = asyncio.create_task(engine.generate(ask(2, new=60, number=1)))
        mine = asyncio.create_task(engine.generate(ask(2, new=240)))
        while len(engine._sent) < 4:
            await asyncio.sleep(0.01)
        await write_along(engine.http, 24)
        mine.cancel()
        with pytest.raises(EngineError) as cancelled:
            await mine
        return cancelled.value.partial, await other

    partial, other = run(server, scenario)
    request = ask(2, new=240)
    assert [len(c.tokens) for c in other] == [60, 60]
    for part in partial:
        assert 0 < len(part.tokens) < 240
        assert part.stop_reason is StopReason.ABORT
        np.testing.assert_allclose(part.logprobs, expected(request, part.tokens).logprob, atol=1e-4)


def test_many_at_once_each_its_own(server):
    requests = [ask(2, new=6 + i, number=i, length=3 + i) for i in range(10)]
    done = run(server, lambda engine: asyncio.gather(*map(engine.generate, requests)), in_flight=8)
    for request, completions in zip(requests, done, strict=True):
        for completion in completions:
            assert len(completion.tokens) == request.max_new_tokens
            np.testing.assert_allclose(completion.logprobs, expected(request, completion.tokens).logprob, atol=1e-4)


def test_what_kills_a_server_is_not_sent_and_the_server_lives(server):
    async def scenario(engine):
        for prompt in ([LIMITS.vocab_size], [-1], [2**31 - 1]):
            with pytest.raises(RequestRefused):
                await engine.generate(dataclasses.replace(ask(), prompt=np.array(prompt, np.int64)))
        with pytest.raises(RequestRefused):
            await engine.score([np.array([1, LIMITS.vocab_size])], 1)
        return await engine.generate(ask())

    assert len(run(server, scenario)[0].tokens) == 12


def test_the_server_s_refusal_is_the_request_s_fault_an_adapter_s_absence_the_engine_s(server):
    long = ask(length=600, new=4)  # more positions than the model has

    async def scenario(engine):
        with pytest.raises(RequestRefused, match="refuses it"):
            await engine.generate(long)
        engine._adapter = "rlx-9"
        with pytest.raises(EngineError) as absent:
            await engine.generate(ask())
        return absent.value

    limits = dataclasses.replace(LIMITS, context=1000)
    assert run(server, scenario, limits).reason == "adapter"


def test_a_wrong_key_is_said_to_be_one(server):
    wrong = dataclasses.replace(server, api_key="not the key")
    with pytest.raises(EngineError, match="give the API key") as refused:
        run(wrong, lambda engine: engine.generate(ask()))
    assert refused.value.reason == "unauthorized"


def test_what_a_server_says_of_itself(server):
    served = run(server, lambda engine: engine.served())
    assert (served.label, served.model_type, served.model_path) == ("0", "qwen3", server.model_path)
    assert CONTEXT < served.input_limit <= tiny_model.ARCH.max_positions
