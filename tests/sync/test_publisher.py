"""A version becomes the one that engines serve, in each of the three ways; whoever misses it is out of service."""

import asyncio

import numpy as np
import pytest

from rlx.metrics.ledger import Ledger
from rlx.rollout import virtual
from rlx.rollout.engine import Request
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.sync.publisher import Publisher
from tests.rollout.scripted import ScriptedEngine, written_by

OPTIONS = FleetOptions(request_timeout_s=5.0, load_timeout_s=1.0, backoff_s=0.1)
MODES = ("barrier", "refresh", "drain")


def ask(number: int) -> Request:
    return Request(f"r{number}", np.arange(4, dtype=np.int32), (number,), 12, 1.0)


def run(mode, main, *scripts):
    """`main(publisher, fleet, engines)` with engines that write 10 tokens in a second."""

    async def whole():
        made = [
            ScriptedEngine(f"e{i}", **{"token_s": 0.1, "lengths": (10, 10), "load_s": 0.1} | script)
            for i, script in enumerate(scripts)
        ]
        async with Fleet(made, OPTIONS, "weights 0", 0, Ledger()) as fleet:
            publisher = Publisher(fleet, mode)
            try:
                return await main(publisher, fleet, *made)
            finally:
                await publisher.close()

    return virtual.run(whole())


def now() -> float:
    return asyncio.get_running_loop().time()


async def ask_all(fleet, numbers, start=0.0):
    await asyncio.sleep(start)
    return [answer for (answer,) in await asyncio.gather(*(fleet.generate(ask(i)) for i in numbers))]


@pytest.mark.parametrize("mode", MODES)
def test_running_responses_go_on_as_the_mode_says(mode):
    async def main(publisher, fleet, engine):
        running = asyncio.create_task(ask_all(fleet, [1]))
        await asyncio.sleep(0.45)
        await publisher.publish("weights 1", 1)
        returned = now()
        after = asyncio.create_task(ask_all(fleet, [2]))
        (first,), (second,) = await running, await after
        await publisher.settled()
        return first, second, returned

    first, second, returned = run(mode, main, {})
    spans = [(s.version, s.start, s.end) for s in first.version_spans]
    # The load takes from 0.45 s to 0.55 s; it counts from its end on.
    assert spans == ([(0, 0, 5), (1, 5, 10)] if mode == "refresh" else [(0, 0, 10)])
    np.testing.assert_array_equal(written_by(first.logprobs), [0] * 5 + [1] * 5 if mode == "refresh" else [0] * 10)
    assert {s.version for s in second.version_spans} == {1}
    assert returned == pytest.approx({"barrier": 1.1, "refresh": 0.55, "drain": 0.45}[mode])


@pytest.mark.parametrize("mode", ["barrier", "refresh"])
def test_no_request_is_sent_while_engines_change_over(mode):
    async def main(publisher, fleet, *engines):
        running = [asyncio.create_task(ask_all(fleet, [i], 0.05 * i)) for i in range(40)]
        await asyncio.sleep(0.52)
        before = [len(e.requests) for e in engines]
        closed = asyncio.create_task(publisher.publish("weights 1", 1))
        await asyncio.sleep(0.099 if mode == "refresh" else 0.5)
        during = [len(e.requests) for e in engines]
        await closed
        answers = [(await r)[0] for r in running]
        return before, during, answers

    before, during, answers = run(mode, main, {"admission": 20}, {"admission": 20})
    assert before == during
    versions = [{*written_by(a.logprobs).tolist()} for a in answers]
    assert versions[0] == ({0} if mode == "barrier" else {0, 1})
    assert versions[-1] == {1}
    assert mode == "refresh" or all(len(v) == 1 for v in versions)


def test_the_others_serve_while_one_drains():
    """Of three engines one drains at a time, and at no moment none takes requests."""

    async def main(publisher, fleet, *engines):
        running = [asyncio.create_task(ask_all(fleet, [i], 0.1 * i)) for i in range(40)]
        await asyncio.sleep(1.0)
        await publisher.publish("weights 1", 1)
        seen = []
        while not publisher._drain.done():
            seen.append((sum(m.open for m in fleet.members), sum(e.version for e in engines)))
            await asyncio.sleep(0.05)
        return seen, [(await r)[0] for r in running]

    seen, answers = run("drain", main, *[{"admission": 20}] * 3)
    assert {opened for opened, _ in seen[1:]} == {2}
    assert {done for _, done in seen} >= {0, 1, 2}
    assert all(len({*written_by(a.logprobs).tolist()}) == 1 for a in answers)
    mixed = [{*written_by(a.logprobs).tolist()} for a in answers[10:35]]
    assert {0} in mixed
    assert {1} in mixed


def test_a_version_that_comes_during_a_drain_is_taken_along():
    async def main(publisher, fleet, *engines):
        running = asyncio.create_task(ask_all(fleet, range(4)))
        await asyncio.sleep(0.5)
        for version in (1, 2, 3):
            await publisher.publish(f"weights {version}", version)
            await asyncio.sleep(0.02)
        await publisher.settled()
        await running
        return [e.version for e in engines], [e.loads for e in engines]

    versions, loads = run("drain", main, {}, {})
    assert versions == [3, 3]
    assert loads == [[3], [3]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", ["hangs", "raises", "keeps_version"])
def test_an_engine_that_misses_a_publication_is_out_until_it_has_it(mode, bad):
    async def main(publisher, fleet, *engines):
        await publisher.publish("weights 1", 1)
        await publisher.settled()
        out = [m.engine.name for m in fleet.members if not m.in_service]
        answers = await ask_all(fleet, range(6))
        await asyncio.sleep(5)
        return out, answers, engines[0].loads, len(fleet.in_service), await ask_all(fleet, range(6))

    script = {"bad_loads": lambda load: bad if load == 0 else None}
    out, answers, loads, back, later = run(mode, main, script, {})
    assert out == ["e0"]
    assert {*np.concatenate([written_by(a.logprobs) for a in answers])} == {1}
    assert (loads, back) == ([1, 1], 2)
    assert {*np.concatenate([written_by(a.logprobs) for a in later])} == {1}


def test_engines_reopen_when_they_have_loaded_not_when_the_slowest_has():
    async def main(publisher, fleet, *engines):
        publication = asyncio.create_task(publisher.publish("weights 1", 1))
        await asyncio.sleep(0.2)
        await ask_all(fleet, [1])
        return now(), publication.done()

    at, done = run("refresh", main, {"load_s": 0.9, "lengths": (1, 1)}, {"lengths": (1, 1)})
    assert at == pytest.approx(0.3)
    assert not done


def test_an_engine_ejected_before_its_turn_is_left_to_its_repair():
    async def main(publisher, fleet, *engines):
        running = asyncio.create_task(ask_all(fleet, [1]))
        await asyncio.sleep(0.1)
        await publisher.publish("weights 1", 1)
        with pytest.raises(Exception, match="a defect"):
            await running
        await publisher.settled()
        await asyncio.sleep(2)
        return engines[0].loads, engines[0].version, len(fleet.in_service)

    assert run("barrier", main, {"faults": {0: "raises"}}) == ([1], 1, 1)


def test_only_newer_versions_are_published():
    async def main(publisher, fleet, engine):
        await publisher.publish("weights 2", 2)
        with pytest.raises(ValueError, match="version 2 is not newer than 2"):
            await publisher.publish("weights 2", 2)

    run("refresh", main, {})
