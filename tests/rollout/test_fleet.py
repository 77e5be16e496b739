"""Requests find their way, engines that fail are ejected and come back, and nothing wrong gets through."""

import asyncio
import dataclasses
from collections import Counter

import numpy as np
import pytest

from rlx.metrics.ledger import Ledger
from rlx.rollout import virtual
from rlx.rollout.engine import EngineError, Request, RequestRefused, check_request
from rlx.rollout.fleet import GRACE_S, Fleet, FleetOptions
from rlx.types import VersionSpan
from tests.rollout.scripted import ScriptedEngine

OPTIONS = FleetOptions(request_timeout_s=2.0, load_timeout_s=1.0, backoff_s=0.1, outage_s=30.0)


def ask(number: int = 0, seeds: tuple[int, ...] | None = None, new: int = 12) -> Request:
    return Request(f"r{number}", np.arange(4, dtype=np.int32), seeds or (number,), new, 1.0)


def now() -> float:
    return asyncio.get_running_loop().time()


def serve(main, *engines, options=OPTIONS, ledger=None):
    """Run `main(fleet, engines)` on virtual time."""

    async def whole():
        made = [make() for make in engines] or [ScriptedEngine()]
        async with Fleet(made, options, "weights 0", 0, ledger or Ledger()) as fleet:
            return await main(fleet, *made)

    return virtual.run(whole())


def engine(name="a", **script):
    return lambda: ScriptedEngine(name, **script)


async def outcome(fleet, number=0, **changes):
    """Tokens of the answer, or the reason of the error."""
    try:
        (answer,) = await fleet.generate(ask(number, **changes))
    except EngineError as error:
        return error.reason
    return len(answer.tokens)


# ------------------------------------------------------------------------------------------------------------- routing


def test_a_request_goes_to_the_engine_with_the_fewest():
    async def main(fleet, *engines):
        await asyncio.gather(*(fleet.generate(ask(i)) for i in range(9)))
        return [len(e.requests) for e in engines]

    assert serve(main, *(engine(n, lengths=(8, 8)) for n in "abc")) == [3, 3, 3]


def test_no_engine_has_more_requests_than_permits():
    """Twice its admission: half of them run, half are there when one ends. The others wait for any engine."""

    async def main(fleet, a):
        jobs = [asyncio.create_task(fleet.generate(ask(i))) for i in range(20)]
        await asyncio.sleep(0.001)
        sent = len(a.requests), fleet.permits.level, fleet.queued.level, fleet.busy.level
        await asyncio.gather(*jobs)
        return sent, a.most_running, len(a.requests), fleet.permits.level, fleet.busy.level

    assert serve(main, engine(admission=3)) == ((6, 6, 14, 3), 3, 20, 0, 0)


def test_first_come_first_served():
    async def main(fleet, a):
        order = []
        jobs = [asyncio.create_task(fleet.generate(ask(i))) for i in range(12)]
        for i, job in enumerate(jobs):
            job.add_done_callback(lambda _, i=i: order.append(i))
        await asyncio.gather(*jobs)
        return order

    assert serve(main, engine(admission=1, lengths=(4, 4))) == list(range(12))


def test_a_session_stays_with_its_engine_where_it_can_begin_at_once():
    async def main(fleet, a, b):
        first, _ = await fleet.serve(ask(0), prefer="b")
        running = [asyncio.create_task(fleet.generate(ask(i))) for i in range(1, 4)]
        await asyncio.sleep(0)
        full = [asyncio.create_task(fleet.serve(ask(9), prefer="b")) for _ in range(2)]
        return first, [(await f)[0] for f in full], await asyncio.gather(*running) and len(a.requests)

    first, after, _ = serve(main, engine("a", admission=2), engine("b", admission=2))
    assert first == "b"
    assert after == ["b", "a"]


def test_whoever_gives_up_leaves_its_place_to_others():
    async def main(fleet, a):
        jobs = [asyncio.create_task(fleet.generate(ask(i))) for i in range(6)]
        await asyncio.sleep(0.001)
        for job in (jobs[0], jobs[3], jobs[5]):  # running, sent, waiting
            job.cancel()
        answers = await asyncio.gather(*jobs, return_exceptions=True)
        return [isinstance(a, asyncio.CancelledError) for a in answers], fleet.permits.level, len(a.running)

    cancelled, permits, running = serve(main, engine(admission=2))
    assert cancelled == [True, False, False, True, False, True]
    assert (permits, running) == (0, 0)


def right_after_handing_out(fleet, act):
    """Between a permit and the moment at which it is used."""
    hand_out = fleet._hand_out

    def both():
        hand_out()
        act()

    fleet._hand_out = both


def test_a_permit_that_comes_with_a_cancellation_goes_to_the_next():
    async def main(fleet, a):
        first = asyncio.create_task(fleet.generate(ask(0)))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(fleet.generate(ask(i))) for i in (1, 2)]
        await asyncio.sleep(0)
        right_after_handing_out(fleet, waiting[0].cancel)
        await asyncio.gather(first, *waiting, return_exceptions=True)
        return [r.id for r in a.requests], fleet.permits.level, fleet.members[0].load

    options = FleetOptions(http_admission=1)
    assert serve(main, engine(admission=1), options=options) == (["r0", "r2"], 0, 0)


def test_an_engine_that_closes_as_it_gets_a_request_does_not_get_it():
    async def main(fleet, a, b):
        jobs = [asyncio.create_task(fleet.generate(ask(i))) for i in (7, 11, 0)]
        await asyncio.sleep(0)
        right_after_handing_out(fleet, lambda: fleet.close(fleet.members[0]))
        await asyncio.gather(*jobs)
        return [r.id for r in a.requests], [r.id for r in b.requests], [m.load for m in fleet.members]

    options = FleetOptions(http_admission=1)
    got = serve(main, engine("a", admission=1), engine("b", admission=1), options=options)
    assert got == (["r7"], ["r11", "r0"], [0, 0])


# -------------------------------------------------------------------------------------------------------------- faults

KINDS = {
    "dies": "dead",
    "dies_with_partial": "dead",
    "raises": "exception",
    "hangs": "timeout",
    "hangs_deaf": "timeout",
    "short": "short",
    "positive": "logprobs",
    "shifted_head": "head",
    "nonfinite": "nonfinite",
    "duplicate_ids": "head",
    "two_answers": "count",
    "wrong_version": "version",
    "old_version": "version",
    "empty": "count",
    "none": "count",
}


@pytest.mark.parametrize("fault, reason", KINDS.items())
def test_an_engine_that_fails_is_ejected_and_comes_back_with_the_current_weights(fault, reason):
    async def main(fleet, a, b):
        got = await outcome(fleet, seeds=(7,))
        out = [m.engine.name for m in fleet.in_service]
        other = await outcome(fleet, 1)
        await asyncio.sleep(1)
        return got, out, other, len(b.requests), a.loads, len(fleet.in_service), await outcome(fleet, 2)

    got, out, other, sent, loads, back, after = serve(main, engine("a", faults={0: fault}, head_size=3), engine("b"))
    assert got == reason
    assert out == ["b"]
    assert (other, sent) == (2, 1)
    assert (loads, back, after) == ([0], 2, 3)


@pytest.mark.parametrize("fault", ["short", "positive", "nonfinite", "two_answers", "wrong_version"])
def test_tokens_that_came_and_are_refused_are_booked(fault):
    ledger = Ledger()

    async def main(fleet, a):
        await outcome(fleet, seeds=(7,))

    serve(main, engine(faults={0: fault}), ledger=ledger)
    assert ledger.total.tokens == ledger["failed"].tokens == 8  # of the same answer twice, once
    assert ledger["failed/engine_" + KINDS[fault]].tokens == 8


def test_an_answer_that_comes_too_late_is_booked_once_and_not_used():
    ledger = Ledger()

    async def main(fleet, a):
        a._deaf = lambda seconds: ScriptedEngine._deaf(a, 3.0)
        got = await outcome(fleet, seeds=(7,))
        await asyncio.sleep(5)
        return got

    assert serve(main, engine(faults={0: "hangs_deaf"}), ledger=ledger) == "timeout"
    assert ledger["failed/engine_late"].tokens == ledger.total.tokens == 8


def test_what_an_engine_had_written_when_it_died_is_handed_on():
    async def main(fleet, a):
        with pytest.raises(EngineError) as caught:
            await fleet.generate(ask(seeds=(11,)))
        return caught.value.partial

    (saved,) = serve(main, engine(faults={0: "dies_with_partial"}))
    assert len(saved.tokens) == 6
    assert saved.version_spans[0].end == 6


def test_a_part_that_makes_no_sense_is_not():
    ledger = Ledger()

    async def main(fleet, a):
        whole = a._completion
        a._completion = lambda job, n: a._spoil("positive", [whole(job, n)])[0]
        with pytest.raises(EngineError) as caught:
            await fleet.generate(ask(seeds=(11,)))
        return caught.value.partial

    assert serve(main, engine(faults={0: "dies_with_partial"}), ledger=ledger) == ()
    assert ledger["failed/engine_logprobs"].tokens == 6


def test_the_other_requests_of_an_ejected_engine_may_end_and_then_are_given_up():
    """One ends well within the grace, one hangs and is cancelled, one does not even hear that."""

    async def main(fleet, a):
        jobs = [asyncio.create_task(outcome(fleet, seeds=(seed,))) for seed in (0, 11, 3, 4)]
        times = {}
        for i, job in enumerate(jobs):
            job.add_done_callback(lambda _, i=i: times.update({i: now()}))
        return await asyncio.gather(*jobs), times

    script = engine(faults={0: "raises", 2: "hangs", 3: "hangs_deaf"}, token_s=0.1)
    options = FleetOptions(request_timeout_s=100.0, backoff_s=50.0)
    got, times = serve(main, script, options=options)
    assert got == ["exception", 12, "ejected", "ejected"]
    assert times[2] == pytest.approx(times[0] + GRACE_S)
    assert times[3] == pytest.approx(times[0] + 2 * GRACE_S)


def test_an_aborted_answer_is_no_fault():
    async def main(fleet, a):
        with pytest.raises(EngineError) as caught:
            await fleet.generate(ask(seeds=(7,)))
        return caught.value.reason, len(caught.value.partial[0].tokens), len(fleet.in_service)

    assert serve(main, engine(faults={0: "aborts"})) == ("aborted", 8, 1)


def test_a_request_that_nobody_can_serve_is_no_fault_of_the_engine():
    async def main(fleet, a):
        async def refuse(request):
            check_request(request, vocab_size=2, context=100)

        a.generate = refuse
        with pytest.raises(RequestRefused, match="token ids must be in"):
            await fleet.generate(ask())
        return len(fleet.in_service)

    assert serve(main) == 1


def test_an_engine_that_restarted_with_old_weights_gets_no_request():
    async def main(fleet, a, b):
        fleet.version = 1
        for member in fleet.members:
            await fleet.load(member)
        a.version = 0
        got = await outcome(fleet)
        return got, len(a.requests), fleet.ejected, await outcome(fleet)

    assert serve(main, engine("a"), engine("b")) == ("version", 0, Counter(version=1), 1)


def test_versions_of_before_the_request_and_in_the_wrong_order_are_refused():
    async def main(fleet, a):
        member = fleet.members[0]
        for version in (1, 2):
            fleet.version = version
            await fleet.load(member)
        a._fault = lambda number: "was"
        results = []
        for versions in ([1], [1, 2], [2], [2, 2]):
            a._spoil = lambda fault, answers, v=versions: [spanned(answers[0], v)]
            results.append(await outcome(fleet, seeds=(7,)))
            await asyncio.sleep(1)
        return results

    assert serve(main) == ["version", "version", 8, 8]


def spanned(answer, versions):
    bounds = np.linspace(0, len(answer.tokens), len(versions) + 1).astype(int)
    spans = tuple(VersionSpan(v, int(a), int(b)) for v, a, b in zip(versions, bounds, bounds[1:]))
    return dataclasses.replace(answer, version_spans=spans)
