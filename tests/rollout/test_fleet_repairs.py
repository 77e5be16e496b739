"""Engines that were ejected come back with the current weights, however long it takes; without any the run ends."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from rlx.metrics.ledger import Ledger
from rlx.rollout.engine import EngineError
from rlx.rollout.fleet import Fleet, FleetDown, FleetOptions
from tests.rollout.scripted import ScriptedEngine, written_by
from tests.rollout.test_fleet import OPTIONS, ask, engine, now, outcome, serve


def test_repairs_wait_longer_and_longer_up_to_a_tenth_of_the_outage_and_never_end():
    async def main(fleet, a, b):
        await outcome(fleet, seeds=(0,))
        times = []
        load = a.load

        async def noted(weights, version):
            times.append(now())
            await load(weights, version)

        a.load = noted
        await asyncio.sleep(1000)
        return times, len(fleet.in_service), await outcome(fleet)

    bad = lambda load: "raises" if load < 100 else None  # noqa: E731
    times, left, after = serve(
        main, engine("a", faults={0: "raises"}, bad_loads=bad, token_s=1e-9, load_s=0.0), engine("b")
    )
    waits = np.diff([0.0, *times])
    assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.0], rel=1e-3)
    assert waits[5:] == pytest.approx(3.0, rel=1e-3)
    assert len(times) == 101
    assert (left, after) == (2, 1)


def test_an_engine_that_is_gone_for_most_of_the_outage_is_found_when_it_is_back():
    """A server that needs minutes to start: no number of quick repairs may end the run."""

    async def main(fleet, a):
        assert await outcome(fleet) == "exception"
        return await outcome(fleet, 1), now()

    options = FleetOptions(outage_s=300.0, backoff_s=1.0)
    down = engine(faults={0: "raises"}, bad_loads=lambda load: "raises" if now() < 250.0 else None)
    served, at = serve(main, down, options=options)
    assert served == 2
    assert 250.0 < at < 281.0


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
        with pytest.raises(FleetDown, match=r"none of 1 engines .*cannot load") as caught:
            await waiting
        at = now()
        with pytest.raises(FleetDown):
            await fleet.generate(ask(2))
        return at, isinstance(caught.value.__cause__, EngineError)

    options = FleetOptions(outage_s=7.0, http_admission=1)
    gone = engine(faults={0: "raises"}, admission=1, bad_loads=lambda load: "raises")
    at, caused = serve(main, gone, options=options)
    assert at == pytest.approx(7.0, abs=0.1)
    assert caused


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
