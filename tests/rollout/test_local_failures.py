"""Cancelled requests, dispatches that fail, event loops that end: who learns of it, and what works afterwards."""

import asyncio

import numpy as np
import pytest

from rlx.metrics.ledger import Ledger, failed
from rlx.models import sampler
from rlx.rollout.engine import EngineError
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.types import StopReason, VersionSpan
from tests import tiny_model
from tests.rollout.serving import ask, assert_same, make_engine, serve
from tests.tiny_model import ARCH

FIRST, SECOND, THIRD = ask(0, 5, 2), ask(1, 12, 2), ask(2, 7, 2)


@pytest.fixture(scope="module")
def wanted():
    return serve(make_engine(ARCH, tiny_model.params()), [FIRST, SECOND, THIRD])


@pytest.fixture
def engine():
    """Three slots."""
    return make_engine(ARCH, tiny_model.params())


def assert_answers(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert_same(x, y)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def test_a_cancelled_request_disturbs_no_other(engine, wanted):
    """SECOND has one sample in a slot and one in the queue when it is cancelled."""

    async def work():
        first, second, third = (asyncio.create_task(engine.generate(r)) for r in (FIRST, SECOND, THIRD))
        await until(lambda: engine.stats.new_tokens > 0)
        second.cancel()
        with pytest.raises(EngineError) as caught:
            await second
        return await first, await third, caught.value

    first, third, error = asyncio.run(work())
    assert_answers(first, wanted[0])
    assert_answers(third, wanted[2])
    stats = engine.stats
    assert 0 < stats.aborted_tokens < 10  # the sample in the slot was given up on the way, the queued one never begun
    assert stats.new_tokens == 40 + stats.aborted_tokens
    begun, queued = error.partial
    assert (error.reason, len(begun.tokens), queued) == ("cancelled", stats.aborted_tokens, None)
    np.testing.assert_array_equal(begun.tokens, wanted[1][0].tokens[: len(begun.tokens)])
    assert_answers(serve(engine, [SECOND])[0], wanted[1])


def test_slots_of_a_cancelled_request_are_free_at_once(engine, wanted):
    """Even where nobody else waits: the next request is not decoded beside what nobody wants."""

    async def cancelled():
        running = asyncio.create_task(engine.generate(FIRST))
        await until(lambda: engine.stats.new_tokens > 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return await engine.generate(SECOND)

    assert_answers(asyncio.run(cancelled()), wanted[1])
    assert 2 * 3 <= engine.stats.aborted_tokens <= 2 * 6  # two samples, to the end of the dispatch of three steps
    assert engine.stats.new_tokens == 20 + engine.stats.aborted_tokens


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_every_token_of_a_request_that_ends_early_is_in_the_books(engine, how):
    """Cancelled, what was written comes back to whoever asked; given up by the fleet, it is booked as late."""
    ledger, limit = Ledger(), 60.0 if how == "cancelled" else 1e-3
    fleet = Fleet([engine], FleetOptions(request_timeout_s=limit), None, 0, ledger)

    async def work():
        async with fleet:
            asked = asyncio.create_task(fleet.serve(ask(0, 5, 1, new=27)))
            if how == "cancelled":
                await until(lambda: engine.stats.new_tokens > 0)
                asked.cancel()
            with pytest.raises(EngineError) as caught:
                await asked
        return caught.value

    error = asyncio.run(work())
    assert error.reason == how
    assert 0 < engine.stats.new_tokens < 27
    returned = sum(len(part.tokens) for part in error.partial)
    late = ledger[failed("engine_late")].tokens
    assert (returned, late) == ((engine.stats.new_tokens, 0) if how == "cancelled" else (0, engine.stats.new_tokens))


def test_a_failed_dispatch_reaches_everyone_who_waits(engine, wanted, monkeypatch):
    """Running and queued alike, with what was written before. Later requests see nothing of it."""
    real, calls = sampler.decode, []

    def broken(*args):
        calls.append(args)
        slots = real(*args)
        if len(calls) == 2:
            raise RuntimeError("out of memory")  # after the old slots were given away
        return slots

    async def work():
        return await asyncio.gather(*(engine.generate(r) for r in (FIRST, SECOND, THIRD)), return_exceptions=True)

    monkeypatch.setattr(sampler, "decode", broken)
    failures = asyncio.run(work())
    assert len(calls) == 2
    assert all(isinstance(f, EngineError) and "out of memory" in str(f) for f in failures), failures
    assert [[p and len(p.tokens) for p in f.partial] for f in failures] == [[3, 3], [3, None], [None, None]]
    for part, whole in zip(failures[0].partial, wanted[0], strict=True):
        assert part.stop_reason is StopReason.ABORT
        assert part.version_spans == (VersionSpan(0, 0, 3),)
        np.testing.assert_array_equal(part.tokens, whole.tokens[:3])
        np.testing.assert_array_equal(part.head.ids, whole.head.ids[:3])
    assert engine.stats.aborted_tokens == 9
    monkeypatch.setattr(sampler, "decode", real)
    for got, same in zip(serve(engine, [FIRST, SECOND, THIRD]), wanted, strict=True):
        assert_answers(got, same)


def test_a_failed_prefill_reaches_everyone_who_waits(engine, wanted, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(sampler, "prefill", broken)
    with pytest.raises(EngineError, match="no such kernel"):
        serve(engine, [FIRST])
    monkeypatch.undo()
    assert_answers(serve(engine, [FIRST])[0], wanted[0])


def test_requests_of_a_loop_that_ended_are_gone(engine, wanted):
    """A loop that is closed cancels what runs; the engine serves the next loop from empty slots."""

    async def interrupted():
        running = asyncio.create_task(engine.generate(FIRST))
        await until(lambda: engine.stats.new_tokens > 0)
        assert not running.done()

    asyncio.run(interrupted())
    for got, same in zip(serve(engine, [SECOND, THIRD]), wanted[1:], strict=True):
        assert_answers(got, same)


def test_requests_may_come_while_others_run(engine, wanted):
    async def work():
        first = asyncio.create_task(engine.generate(FIRST))
        await until(lambda: engine.stats.new_tokens > 0)
        return await asyncio.gather(first, engine.generate(SECOND))

    first, second = asyncio.run(work())
    assert_answers(first, wanted[0])
    assert_answers(second, wanted[1])
