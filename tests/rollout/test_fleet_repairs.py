"""Engines that were ejected come back with the current weights, or are given up; without any the run ends."""

import asyncio
from collections import Counter

import pytest

from rlx.metrics.ledger import Ledger
from rlx.rollout.engine import EngineError
from rlx.rollout.fleet import Fleet, FleetDown, FleetOptions
from tests.rollout.scripted import ScriptedEngine, written_by
from tests.rollout.test_fleet import OPTIONS, ask, engine, now, outcome, serve


def test_repairs_wait_longer_and_longer_and_end():
    async def main(fleet, a, b):
        await outcome(fleet, seeds=(0,))
        times = []
        load = a.load

        async def noted(weights, version):
            times.append(round(now(), 3))
            await load(weights, version)

        a.load = noted
        await asyncio.sleep(100)
        return times, len(fleet.in_service), await outcome(fleet)

    bad = lambda load: ("raises", "raises", None)[load]  # noqa: E731
    times, left, after = serve(
        main, engine("a", faults={0: "raises"}, bad_loads=bad, token_s=1e-9, load_s=0.0), engine("b")
    )
    assert times == [0.1, 0.3]  # 0.1 s, then 0.2 s after the first failed: two repairs
    assert (left, after) == (1, 1)


def test_good_answers_make_up_for_failures():
    async def main(fleet, a):
        results = []
        for i in range(12):
            results.append(await outcome(fleet, i))
            await asyncio.sleep(1)
        return results

    got = serve(main, engine(faults=lambda number: "raises" if number % 2 else None))
    assert got[1::2] == ["exception"] * 6


def test_a_load_that_hangs_is_a_failed_one():
    async def main(fleet, a, b):
        fleet.version = 1
        start = now()
        served = await asyncio.gather(*(fleet.reload(m) for m in fleet.members))
        return served, now() - start, fleet.ejected

    got = serve(main, engine("a", bad_loads=lambda load: "hangs" if load == 0 else None), engine("b"))
    assert got == ([False, True], pytest.approx(1.0), Counter(load=1))


def test_the_run_ends_when_there_has_been_no_engine_for_too_long():
    async def main(fleet, a):
        waiting = asyncio.create_task(fleet.generate(ask(1)))
        assert await outcome(fleet) == "exception"
        with pytest.raises(FleetDown, match=r"none of 1 engines .*a defect") as caught:
            await waiting
        at = now()
        with pytest.raises(FleetDown):
            await fleet.generate(ask(2))
        return at, isinstance(caught.value.__cause__, EngineError)

    options = FleetOptions(outage_s=7.0, backoff_s=100.0, http_admission=1)
    at, caused = serve(main, engine(faults={0: "raises"}, admission=1), options=options)
    assert at == pytest.approx(7.0, abs=0.1)
    assert caused


def test_it_ends_at_once_when_every_engine_is_given_up():
    async def main(fleet, a):
        assert await outcome(fleet) == "exception"
        with pytest.raises(FleetDown):
            await fleet.generate(ask(1))
        return now()

    assert serve(main, engine(faults={0: "raises"}, bad_loads=lambda load: "raises")) < OPTIONS.outage_s


def test_an_engine_that_comes_back_in_time_ends_the_outage():
    async def main(fleet, a):
        assert await outcome(fleet) == "exception"
        got = await outcome(fleet, 1)
        await asyncio.sleep(100)
        return got, await outcome(fleet, 2)

    assert serve(main, engine(faults={0: "raises"})) == (2, 3)


def test_an_engine_under_repair_takes_the_newest_weights():
    """Two versions come while it loads the first."""

    async def main(fleet, a):
        assert await outcome(fleet) == "exception"
        for version in (1, 2):
            fleet.version, fleet.weights = version, f"weights {version}"
            await asyncio.sleep(0.12)
        await asyncio.sleep(1)
        (answer,) = await fleet.generate(ask(7))
        return a.loads, set(written_by(answer.logprobs).tolist())

    assert serve(main, engine(faults={0: "raises"}, load_s=0.1)) == ([1, 2], {2})


def test_engines_need_names_of_their_own():
    with pytest.raises(ValueError, match=r"names of their own, got \['a', 'a'\]"):
        Fleet([ScriptedEngine("a"), ScriptedEngine("a")], OPTIONS, None, 0, Ledger())
    with pytest.raises(ValueError, match=r"got \[\]"):
        Fleet([], OPTIONS, None, 0, Ledger())


def test_it_is_an_engine_itself():
    """Evaluation asks it for several samples of a prompt at once."""

    async def main(fleet, a):
        return [len(c.tokens) for c in await fleet.generate(ask(seeds=(0, 1, 2)))]

    assert serve(main) == [1, 2, 3]
