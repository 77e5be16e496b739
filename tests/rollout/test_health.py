"""Engines that are looked after while nobody asks them, and requests that outlive an engine."""

from __future__ import annotations

import asyncio

import pytest

from rlx.metrics.ledger import Ledger
from rlx.rollout.engine import EngineError, RequestRefused
from rlx.rollout.fleet import Fleet
from rlx.rollout.health import watch
from rlx.rollout.persistent import Persistent
from tests.rollout.test_fleet import ask, engine, serve


class Probe:
    """Fails from `bad` on, until `good`; takes `seconds`."""

    def __init__(self, bad: float = 0.0, good: float = 1e9, seconds: float = 0.0):
        self.bad, self.good, self.seconds, self.asked = bad, good, seconds, 0

    async def __call__(self) -> None:
        self.asked += 1
        await asyncio.sleep(self.seconds)
        if self.bad <= asyncio.get_running_loop().time() < self.good:
            raise EngineError("no answer", reason="timeout")


def watched(probe: Probe, during, *engines, every: float = 1.0):
    """What `during(fleet)` returns, with the first engine watched on a virtual clock."""

    async def main(fleet, *_):
        task = asyncio.create_task(watch(fleet, fleet.members[0], probe, every))
        try:
            return await during(fleet)
        finally:
            task.cancel()

    return serve(main, *engines)


def test_an_engine_that_answers_nothing_is_ejected_and_comes_back():
    async def during(fleet: Fleet):
        await asyncio.sleep(4.0)
        out = len(fleet.in_service)
        await asyncio.sleep(60.0)
        return out, len(fleet.in_service), dict(fleet.ejected)

    first, second = engine("a", bad_loads=lambda load: "raises" if load < 3 else None), engine("b")
    out, back, ejected = watched(Probe(bad=2.5, good=3.5), during, first, second)
    assert (out, back) == (1, 2)
    assert ejected == {"health": 1}


def test_an_engine_that_loads_is_not_asked():
    probe = Probe()

    async def during(fleet: Fleet):
        fleet.version = 1
        await fleet.load(fleet.members[0])
        return probe.asked, dict(fleet.ejected)

    assert watched(probe, during, engine("a", load_s=0.9), every=0.1) == (0, {})


def test_a_publication_that_begins_while_an_engine_is_asked_explains_its_silence():
    async def during(fleet: Fleet):
        await asyncio.sleep(1.5)  # the question is on its way
        fleet.version = 1
        await fleet.load(fleet.members[0])
        return dict(fleet.ejected)

    assert watched(Probe(seconds=1.0), during, engine("a", load_s=0.8)) == {}


def test_a_request_outlives_its_engine_and_what_was_lost_is_booked():
    async def main(fleet, a, b):
        persistent = Persistent(fleet, fleet.books, retries=2, backoff_s=0.1)
        (answer,) = await persistent.generate(ask(0))
        books = fleet.books
        assert isinstance(books, Ledger)
        lost = books["failed/engine_dead"].tokens
        return len(answer.tokens), lost, books["in_flight"].tokens

    written, lost, left = serve(
        main, engine("a", faults={0: "dies_with_partial"}, lengths=(8, 8)), engine("b", lengths=(8, 8))
    )
    assert written == 8
    assert lost == 4
    assert left == 0


@pytest.mark.parametrize("retries, asked", [(0, 1), (2, 3)])
def test_a_request_that_always_fails_ends_with_the_last_failure(retries, asked):
    async def main(fleet, a):
        with pytest.raises(EngineError):
            await Persistent(fleet, fleet.books, retries, 0.1).generate(ask(0))
        return len(a.requests)

    assert serve(main, engine("a", faults=lambda number: "raises")) == asked


def test_what_no_engine_can_serve_is_asked_once():
    async def main(fleet, a):
        async def refuse(request):
            a.requests.append(request)
            raise RequestRefused("too long")

        a.generate = refuse
        with pytest.raises(RequestRefused):
            await Persistent(fleet, fleet.books, 3, 0.1).generate(ask(0))
        return len(a.requests)

    assert serve(main, engine("a")) == 1
