"""The server as clients see it, and what it records of them."""

import asyncio
import json

import aiohttp
import numpy as np
import openai
import pytest

from rlx.agents.chat_format import ChatFormat
from rlx.agents.endpoint import Endpoint
from rlx.agents.openai import Sampling
from rlx.agents.recorder import Limits, Recorder
from rlx.envs.chat import load_chat_tokenizer
from rlx.types import StopReason, Task
from tests import tiny_tokenizer
from tests.agents.speaking import Speaking, judge

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TASK = Task("talk/0", "talk", "question", "two", "exact")
LIMITS = Limits(context=2000, max_new_tokens=300, temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_chat_tokenizer(tiny_tokenizer.build(tmp_path_factory.mktemp("tokenizer")), "", "")


def user(text):
    return {"role": "user", "content": text}


def serve(tokenizer, texts, client, limits=LIMITS, gate=None):
    """(what `client` returns, the sessions by name, the engine) of clients at an endpoint of a speaking engine."""
    engine = Speaking(tokenizer, texts, gate=gate)
    sessions = {}

    def newcomer(name):
        sessions[name] = Recorder(name, len(sessions), engine, ChatFormat(tokenizer), limits)
        return sessions[name]

    async def main():
        async with Endpoint("tiny", Sampling.CLIENT, newcomer) as endpoint:
            return await client(endpoint)

    return asyncio.run(main()), sessions, engine


def openai_client(endpoint, key="one"):
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=key, max_retries=0)


def test_openais_own_client_talks_over_turns_and_every_token_is_recorded(tokenizer):
    async def client(endpoint):
        async with openai_client(endpoint) as api:
            assert [model.id async for model in api.models.list()] == ["tiny"]
            messages = [user("one?")]
            for question in ("two?", None):
                answer = await api.chat.completions.create(model="tiny", messages=messages, temperature=0.5)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                messages += [user(question)] if question else []
            return answer

    answer, sessions, engine = serve(tokenizer, ["first", "second"], client)
    assert answer.choices[0].message.content == "second"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(engine.requests[1].prompt)
    [segment] = sessions["one"].segments
    np.testing.assert_array_equal(
        engine.requests[1].prompt, segment.transcript.tokens()[: len(engine.requests[1].prompt)]
    )
    assert [r.temperature for r in engine.requests] == [0.5, 0.5]
    [sample] = sessions["one"].samples(TASK, 0, 0, asyncio.run(judge(TASK, "two", segment.transcript)))
    written = tokenizer.tokenizer.decode(sample.tokens[sample.mask].tolist())
    assert written == "first<|im_end|>second<|im_end|>"
    assert (sample.reward, sample.stop_reason, sample.oldest_version) == (1.0, StopReason.STOP, 3)
    assert (sample.logprobs[sample.mask] < 0).all()
    assert not sample.logprobs[~sample.mask].any()


def test_tool_calls_go_out_and_results_come_in(tokenizer):
    texts = ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>', "It is 2."]

    async def client(endpoint):
        async with openai_client(endpoint) as api:
            messages = [user("1 + 1?")]
            first = await api.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
            [call] = first.choices[0].message.tool_calls
            total = sum(json.loads(call.function.arguments).values())
            messages += [first.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": str(total)}]
            second = await api.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
            return first, second

    (first, second), sessions, engine = serve(tokenizer, texts, client)
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert second.choices[0].message.content == "It is 2."
    assert len(sessions["one"].segments) == 1
    told = tokenizer.tokenizer.decode(engine.requests[1].prompt.tolist())
    assert told.endswith("<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_a_rewritten_history_is_a_segment_of_its_own_and_says_so(tokenizer):
    async def client(endpoint):
        async with openai_client(endpoint) as api:
            await api.chat.completions.create(model="tiny", messages=[user("a long story")])
            await api.chat.completions.create(model="tiny", messages=[user("in short"), user("go on")])

    _, sessions, engine = serve(tokenizer, ["first", "second"], client)
    record = sessions["one"].to_dict()
    assert [segment["rewritten"] for segment in record["segments"]] == [None, 0]
    for segment, request in zip(record["segments"], engine.requests):
        prompt = len(request.prompt)
        assert segment["tokens"][:prompt] == request.prompt.tolist()
        assert segment["mask"] == [i >= prompt for i in range(len(segment["tokens"]))]
        assert len(segment["logprobs"]) == len(segment["tokens"])
        assert segment["version_spans"] == [[3, prompt, len(segment["tokens"])]]
        assert (segment["temperatures"], segment["max_tokens"]) == ([1.0], [300])
    verdict = asyncio.run(judge(TASK, "two", sessions["one"].segments[0].transcript))
    assert [s.reward for s in sessions["one"].samples(TASK, 0, 0, verdict)] == [1.0, 1.0]


def test_a_session_is_a_key_or_a_path(tokenizer):
    async def client(endpoint):
        body = {"model": "tiny", "messages": [user("hello")]}
        async with aiohttp.ClientSession() as http:
            for url, key in [
                (f"{endpoint.url}/v1", "a"),
                (f"{endpoint.url}/v1", "b"),
                (endpoint.base_url("c"), "a"),
            ]:
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                    assert response.status == 200
            async with http.post(f"{endpoint.url}/v1/chat/completions", json=body) as response:
                return response.status, await response.json()

    (status, said), sessions, _ = serve(tokenizer, ["x", "y", "z"], client)
    assert sorted(sessions) == ["a", "b", "c"]
    assert status == 401
    assert "it names the session" in said["error"]["message"]


def test_a_stream_is_the_same_answer(tokenizer):
    async def client(endpoint):
        async with openai_client(endpoint) as api:
            stream = await api.chat.completions.create(model="tiny", messages=[user("hello")], stream=True)
            return [chunk async for chunk in stream]

    chunks, _, _ = serve(tokenizer, ["hi there"], client)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hi there"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_response_that_was_cut_goes_on_as_one_that_was(tokenizer):
    async def client(endpoint):
        async with openai_client(endpoint) as api:
            first = await api.chat.completions.create(model="tiny", messages=[user("a")], max_tokens=3)
            mine = first.choices[0].message.model_dump(exclude_none=True)
            await api.chat.completions.create(model="tiny", messages=[user("a"), mine, user("b")])
            return first

    first, sessions, engine = serve(tokenizer, ["a long answer", "end"], client)
    assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("length", "a l")
    assert len(sessions["one"].segments) == 1
    assert "a l<|im_end|>\n<|im_start|>user\nb" in tokenizer.tokenizer.decode(engine.requests[1].prompt.tolist())


def test_what_fails_says_so_and_can_be_asked_again(tokenizer):
    async def client(endpoint):
        async with openai_client(endpoint) as api:
            with pytest.raises(openai.InternalServerError, match="it fell over"):
                await api.chat.completions.create(model="tiny", messages=[user("a")])
            again = await api.chat.completions.create(model="tiny", messages=[user("a")])
            with pytest.raises(openai.BadRequestError, match="not supported"):
                await api.chat.completions.create(model="tiny", messages=[user("a")], n=3)
            with pytest.raises(openai.BadRequestError, match=r"rollout\.max_new_tokens"):
                await api.chat.completions.create(model="tiny", messages=[user("a")], max_tokens=21)
            with pytest.raises(openai.BadRequestError, match="context is of 60"):
                await api.chat.completions.create(model="tiny", messages=[user("a" * 100)])
            return again

    limits = Limits(context=60, max_new_tokens=20, temperature=1.0, seed=0)
    again, sessions, _ = serve(tokenizer, ["fails", "fine"], client, limits)
    assert again.choices[0].message.content == "fine"
    assert [segment.rewritten for segment in sessions["one"].segments] == [None]


def test_two_requests_at_once_are_no_conversation(tokenizer):
    async def client(endpoint, gate):
        async with openai_client(endpoint) as api:
            ask = lambda: api.chat.completions.create(model="tiny", messages=[user("a")])  # noqa: E731
            first = asyncio.ensure_future(ask())
            while not gate.waited:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.ConflictError, match="one conversation"):
                await ask()
            gate.set()
            return await first

    class Gate(asyncio.Event):
        waited = False

        async def wait(self):
            self.waited = True
            return await super().wait()

    gate = Gate()
    answer, _, _ = serve(tokenizer, ["x", "y"], lambda endpoint: client(endpoint, gate), gate=gate)
    assert answer.choices[0].message.content == "x"
