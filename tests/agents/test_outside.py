"""Agents of others as the sessions of a producer: their tokens, their ends, what they may not do."""

import asyncio
import sys

import numpy as np
import openai
import pytest

from rlx.agents.chat_format import ChatFormat
from rlx.agents.endpoint import Endpoint
from rlx.agents.openai import Sampling
from rlx.agents.outside import AgentFailed, OutsideAgent, command_agent
from rlx.envs.chat import load_chat_tokenizer
from rlx.metrics.ledger import Ledger
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling as Draws
from rlx.rollout.collect import collect
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.types import StopReason, Task
from tests import tiny_tokenizer
from tests.agents.speaking import Speaking, judge

TASK = Task("talk/0", "talk", "one?", "second", "exact")
PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.stdin.read()}]
for question in ("two?", ""):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "temperature": 0}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": question}]
print(message["content"])
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_chat_tokenizer(tiny_tokenizer.build(tmp_path_factory.mktemp("tokenizer")), "", "")


def user(text):
    return {"role": "user", "content": text}


def api(place):
    return openai.AsyncOpenAI(base_url=place.base_url, api_key=place.api_key, max_retries=0)


async def two_questions(place):
    async with api(place) as client:
        messages = [user(place.task.question)]
        for question in ("two?", ""):
            answer = await client.chat.completions.create(model="any", messages=messages, temperature=0)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user(question)]
    return answer.choices[0].message.content


async def rewrites(place):
    async with api(place) as client:
        await client.chat.completions.create(model="any", messages=[user("long")])
        await client.chat.completions.create(model="any", messages=[user("short"), user("go on")])
    return "never"


async def silent(place):
    return "no words"


async def breaks(place):
    async with api(place) as client:
        await client.chat.completions.create(model="any", messages=[user("a")])
    raise KeyError("a defect")


def train_on(tokenizer, agent, texts, *, limit=0, failures=100):
    """(samples of a producer's first group, its failures, the ledger, the engine)."""
    engine, ledger = Speaking(tokenizer, texts), Ledger()

    async def main():
        buffer = Buffer(Rules(1, 1, False, False, 1000, False, False), ledger)
        fleet = Fleet([engine], FleetOptions(backoff_s=0.01), "weights", 3, ledger)
        numbers = iter(range(1000))
        async with Endpoint("policy", Sampling.RUN) as endpoint:
            producer = Producer(
                fleet,
                lambda task: OutsideAgent(task, endpoint, ChatFormat(tokenizer), agent, judge),
                lambda: (next(numbers), TASK),
                buffer,
                ledger,
                Draws(2, 60, 1.0, False, 0),
                ProducerOptions(Budgets(1, 2, 1), 1, limit, 30.0, retries=0, failure_limit=failures),
            )
            async with fleet, producer:
                batch = await buffer.take(3)
                buffer.done(batch, applied=True)
                ledger.check(producer.holdings() | buffer.holdings())
        return batch.samples, producer.failures

    return *asyncio.run(main()), ledger, engine


@pytest.mark.parametrize("agent", [two_questions, command_agent([sys.executable, "-c", PROGRAM])])
def test_an_agents_session_is_a_sample_of_exactly_its_tokens(tokenizer, agent):
    samples, failures, _, engine = train_on(tokenizer, agent, ["first", "second", "first", "third"] * 3)
    assert not failures
    assert [s.reward for s in samples] == [1.0, 0.0]
    for sample, (first, second) in zip(samples, [engine.requests[:2], engine.requests[2:4]]):
        np.testing.assert_array_equal(sample.tokens[: len(first.prompt)], first.prompt)
        np.testing.assert_array_equal(sample.tokens[: len(second.prompt)], second.prompt)
        assert sample.version_spans[0].version == 3
    assert tokenizer.tokenizer.decode(samples[0].tokens[samples[0].mask].tolist()) == "first<|im_end|>second<|im_end|>"
    assert engine.requests[0].temperature == 1.0, "the run's own"


def test_a_session_that_its_limit_stops_is_judged_on_its_work_so_far(tokenizer):
    samples, _, _, _ = train_on(tokenizer, two_questions, ["first"] * 20, limit=45)
    assert [s.stop_reason for s in samples] == [StopReason.SESSION_LIMIT] * 2
    assert [s.reward for s in samples] == [0.0, 0.0]


@pytest.mark.parametrize(
    "agent, said",
    [
        (rewrites, r"messages\[0\] is not what was said before"),
        (silent, "without asking"),
        (breaks, "a defect"),
        (command_agent([sys.executable, "-c", "import sys; sys.exit('no key')"]), "no key"),
    ],
)
def test_what_an_agent_does_wrong_is_a_failure_with_its_reason(tokenizer, agent, said):
    with pytest.raises(RuntimeError, match=said):
        train_on(tokenizer, agent, ["first", "second"] * 9, failures=2)


def test_closing_ends_the_agent_and_refuses_what_it_asks_later(tokenizer):
    ended = []

    async def patient(place):
        try:
            return await two_questions(place)
        finally:
            ended.append(place)

    async def main():
        async with Endpoint("policy", Sampling.RUN) as endpoint:
            session = OutsideAgent(TASK, endpoint, ChatFormat(tokenizer), patient, judge)
            await session.reset()
            await session.close()
            async with api(ended[0]) as client:
                with pytest.raises(openai.AuthenticationError, match="no session"):
                    await client.chat.completions.create(model="any", messages=[user("more")])

    asyncio.run(main())
    assert len(ended) == 1


def test_a_program_that_cannot_be_started_is_the_agents_failure(tokenizer):
    async def main():
        async with Endpoint("policy", Sampling.RUN) as endpoint:
            session = OutsideAgent(TASK, endpoint, ChatFormat(tokenizer), command_agent(["/no/program"]), judge)
            with pytest.raises(AgentFailed, match="/no/program"):
                await session.reset()

    asyncio.run(main())


def test_synchronous_sessions_go_on_without_one_whose_agent_asks_nothing(tokenizer):
    engine, agents = Speaking(tokenizer, ["first", "second"]), iter([silent, two_questions])

    async def main():
        async with Endpoint("policy", Sampling.RUN) as endpoint:
            make = lambda task: OutsideAgent(task, endpoint, ChatFormat(tokenizer), next(agents), judge)  # noqa: E731
            return await collect(engine, make, [(0, TASK)], Draws(2, 60, 1.0, False, 0, retries=0))

    [group] = asyncio.run(main())
    assert [s.grade["outcome"] for s in group.samples] == ["error", "graded"]
    assert "without asking" in group.samples[0].grade["detail"]
    assert [s.reward for s in group.samples] == [0.0, 1.0]
