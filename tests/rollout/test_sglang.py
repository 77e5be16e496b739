"""The SGLang client against a local server: what it sends, repeats, aborts, and what it makes of failures."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from aiohttp import web

from rlx.rollout import sglang_http
from rlx.rollout.engine import EngineError, Request, RequestRefused
from rlx.rollout.sglang_requests import Limits
from rlx.types import StopReason
from tests.rollout.sglang_server import HEAD, STOP, VOCAB, Server, answer, ask, engine


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_samples_come_in_the_order_of_their_seeds_and_each_body_says_all_that_was_asked():
    async def scenario():
        async with Server() as server:
            client = engine(server.url)
            first = await client.generate(ask(3))
            again = await client.generate(ask(3))
            await client.close()
            return server, first, again

    server, first, again = run(scenario)
    assert [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in again]
    path, key, body = server.seen[0]
    assert (path, key) == ("/generate", "Bearer user")
    assert body["input_ids"] == [1, 2, 3]
    assert body["top_logprobs_num"] == HEAD
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == [STOP]
    assert not sampling["ignore_eos"]
    assert sampling["max_new_tokens"] == 5
    assert {b["sampling_params"]["sampling_seed"] for _, _, b in server.seen} == {0, 1, 2}
    lengths = {len(b["rid"]) for _, _, b in server.seen}
    assert len(lengths) == 1, "a server aborts by the beginning of an id"


def test_a_response_ends_at_the_context_and_runs_on_where_nothing_stops_it():
    async def scenario():
        async with Server() as server:
            client = engine(server.url, limits=Limits(VOCAB, 8, HEAD))
            done = await client.generate(ask(new=30))
            await client.close()
            return server.seen[0][2]["sampling_params"], done

    sampling, done = run(scenario)
    assert sampling["max_new_tokens"] == 5 == len(done[0].tokens)
    assert sampling["ignore_eos"]


@pytest.mark.parametrize(
    "request_",
    [ask(prompt=(1, VOCAB)), ask(prompt=(-1, 2)), ask(prompt=()), ask(prompt=(1,) * 64), ask(new=0), ask(0)]
    + [ask(temperature=t) for t in (-1.0, float("nan"), float("inf"))]
    + [Request("ask", np.array([1.5]), (0,), 5, 1.0), Request("ask", np.array([1]), (2**32,), 5, 1.0)],
)
def test_what_no_server_should_see_is_refused_and_not_sent(request_):
    async def scenario():
        async with Server() as server:
            client = engine(server.url)
            with pytest.raises(RequestRefused):
                await client.generate(request_)
            await client.close()
            return server.seen

    assert run(scenario) == []


def test_a_full_queue_is_waited_for_and_only_the_sample_that_was_turned_away_is_sent_again():
    async def scenario():
        turned = set()

        async def generate(body):
            seed = body["sampling_params"]["sampling_seed"]
            if seed == 1 and len(turned) < 6:
                turned.add(len(turned))
                return web.json_response({"error": {"message": "The request queue is full."}}, status=503)
            return web.json_response(answer(body))

        async with Server(generate) as server:
            client = engine(server.url)
            done = await client.generate(ask(3))
            await client.close()
            return server, done, client

    server, done, client = run(scenario)
    assert len(done) == 3
    assert client.http.retried == 6
    assert len(server.seen) == 3 + 6


def test_a_lost_connection_is_not_sent_again_and_what_else_was_written_is_handed_over():
    async def scenario():
        async def generate(body):
            seed = body["sampling_params"]["sampling_seed"]
            if seed == 1:
                await server.until("/generate", 2)
                raise web.HTTPInternalServerError(text="scheduler died")
            while body["rid"] not in server.aborted:
                await asyncio.sleep(0.005)
            return web.json_response(answer(body, 2, {"type": "abort", "message": "Aborted"}))

        async with Server(generate) as server:
            client = engine(server.url)
            with pytest.raises(EngineError) as failed:
                await client.generate(ask(2))
            await client.close()
            return server, failed.value

    server, error = run(scenario)
    assert error.reason == "status_500"
    assert "scheduler died" in str(error)
    assert server.paths().count("/generate") == 2
    part, none = error.partial
    assert none is None
    assert len(part.tokens) == 2
    assert part.stop_reason is StopReason.ABORT


def test_cancelling_aborts_by_id_and_keeps_what_was_written():
    async def scenario():
        async def generate(body):
            while body["rid"] not in server.aborted:
                await asyncio.sleep(0.005)
            return web.json_response(answer(body, 3, {"type": "abort", "message": "Aborted"}))

        async with Server(generate) as server:
            client = engine(server.url)
            asked = asyncio.create_task(client.generate(ask(2)))
            await server.until("/generate", 2)
            asked.cancel()
            with pytest.raises(EngineError) as cancelled:
                await asked
            await client.close()
            return server, cancelled.value

    server, error = run(scenario)
    assert [len(part.tokens) for part in error.partial] == [3, 3]
    assert {key for path, key, _ in server.seen if path == "/abort_request"} == {"Bearer admin"}


def test_cancelling_before_the_first_token_is_plain_and_asks_nobody_again():
    async def scenario():
        async def generate(body):
            while body["rid"] not in server.aborted:
                await asyncio.sleep(0.005)
            return web.json_response(answer(body, 0, {"type": "abort", "message": "Abort in waiting queue"}))

        async with Server(generate) as server:
            client = engine(server.url)
            asked = asyncio.create_task(client.generate(ask()))
            await server.until("/generate", 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await client.close()
            return server.paths()

    assert run(scenario) == ["/generate", "/abort_request"]


def test_a_sample_that_somebody_else_aborted_before_its_first_token_is_asked_for_again():
    async def scenario():
        async def generate(body):
            first = len(server.seen) == 1
            end = {"type": "abort", "message": "Abort in waiting queue"} if first else None
            return web.json_response(answer(body, 0 if first else None, end))

        async with Server(generate) as server:
            client = engine(server.url)
            done = await client.generate(ask())
            await client.close()
            return server.paths(), done

    paths, done = run(scenario)
    assert paths == ["/generate"] * 2
    assert len(done[0].tokens) == 5


@pytest.mark.parametrize(
    ("status", "said", "kind", "reason"),
    [
        (400, "The input is longer than the model's context length", RequestRefused, "refused"),
        (400, "LoRA adapter 'rlx-3' was requested, but is not loaded", EngineError, "adapter"),
        (401, "Unauthorized", EngineError, "unauthorized"),
        (502, "bad gateway", EngineError, "status_502"),
    ],
)
def test_what_a_status_means(status, said, kind, reason):
    async def scenario():
        async def generate(body):
            return web.json_response({"error": {"message": said}}, status=status)

        async with Server(generate) as server:
            client = engine(server.url)
            with pytest.raises(EngineError) as failed:
                await client.generate(ask())
            await client.close()
            return failed.value

    error = run(scenario)
    assert type(error) is kind
    assert error.reason == reason
    assert said in str(error)


def test_a_server_that_hangs_is_given_up_and_one_that_is_not_there_is_tried_again():
    async def scenario():
        async def generate(body):
            await asyncio.sleep(60)

        async with Server(generate) as server:
            client = engine(server.url, request_timeout_s=0.2)
            with pytest.raises(EngineError) as hung:
                await client.generate(ask())
            await client.close()
        gone = engine(server.url)
        with pytest.raises(EngineError) as refused:
            await gone.generate(ask())
        await gone.close()
        return hung.value, refused.value, gone.http.retried

    hung, refused, retried = run(scenario)
    assert hung.reason == "timeout"
    assert refused.reason == "connection"
    assert retried == 2


def test_a_time_limit_that_passed_while_nobody_looked_is_a_timeout(monkeypatch):
    """The wait before a second attempt ends late, as on a busy machine: no second attempt without a limit follows."""
    sleep = asyncio.sleep

    async def scenario():
        async def generate(body):
            if server.paths().count("/generate") > 1:
                await sleep(60)
            return web.json_response({"error": {"message": "The request queue is full."}}, status=503)

        async with Server(generate) as server:
            client = engine(server.url, request_timeout_s=0.3)
            monkeypatch.setattr(sglang_http.asyncio, "sleep", lambda _: sleep(0.5))
            with pytest.raises(EngineError) as late:
                await client.generate(ask())
            await client.close()
            return late.value, server.paths()

    late, paths = run(scenario)
    assert late.reason == "timeout"
    assert paths.count("/generate") == 1


def test_back_pressure_no_more_samples_are_under_way_than_allowed():
    async def scenario():
        running, most = 0, 0

        async def generate(body):
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.02)
            running -= 1
            return web.json_response(answer(body))

        async with Server(generate) as server:
            client = engine(server.url, in_flight=3)
            await asyncio.gather(*(client.generate(ask(2)) for _ in range(6)))
            await client.close()
            return most, len(server.seen)

    assert run(scenario) == (3, 12)


def test_big_answers_are_parsed_in_a_process_to_the_same_arrays_and_the_same_errors():
    async def scenario():
        async def generate(body):
            value = answer(body)
            if body["sampling_params"]["sampling_seed"] == 1:
                value["meta_info"]["prompt_tokens"] = 99
            return web.json_response(value)

        async with Server(generate) as server:
            here, there = engine(server.url), engine(server.url, parse_processes=1, parse_bytes=0)
            pair = [(await client.generate(ask()))[0] for client in (here, there)]
            with pytest.raises(EngineError) as failed:
                await there.generate(dataclasses.replace(ask(), seeds=(1,)))
            await here.close()
            await there.close()
            return pair, failed.value, there

    (a, b), error, there = run(scenario)
    np.testing.assert_array_equal(a.head.logprobs, b.head.logprobs)
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.version_spans == b.version_spans
    assert error.reason == "prompt"
    assert there._parser.elsewhere == 2
