"""Lanes: several embedded engines that look like one, with the samples of one."""

import asyncio
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlx.rollout import local
from rlx.rollout.engine import EngineError
from rlx.rollout.lanes import LaneEngine, lane_config
from rlx.types import StopReason
from tests import tiny_model
from tests.rollout.serving import CONFIG, ask, assert_same, make_engine, serve
from tests.tiny_model import ARCH

REQUESTS = [ask(0, 5, 2), ask(1, 12, 1), ask(2, 14, 3), ask(3, 7, 1), ask(4, 6, 2)]


@pytest.fixture(scope="module")
def params():
    return tiny_model.params()


def make_lanes(params, count=2):
    weights = local.served(ARCH, params)
    config = lane_config(dataclasses.replace(CONFIG, slots=3 * count, lanes=count))
    return LaneEngine([make_engine(ARCH, weights, config) for _ in range(count)])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_samples_are_those_of_one_engine(params, count):
    engine, one = make_lanes(params, count), make_engine(ARCH, params)
    for got, wanted in zip(serve(engine, REQUESTS), serve(one, REQUESTS), strict=True):
        for each, other in zip(got, wanted, strict=True):
            assert_same(each, other)
    assert engine.admission == 3 * count
    assert engine.stats.new_tokens == one.stats.new_tokens
    assert engine.stats.prompt_tokens == one.stats.prompt_tokens
    assert 0 < engine.stats.occupancy <= 1


def test_a_request_goes_to_the_lane_with_the_fewest_samples_asked_for(params):
    engine = make_lanes(params)
    first, second = engine._lanes
    for round_ in (1, 2):
        serve(engine, REQUESTS)  # of 2, 1, 3, 1 and 2 samples
        assert (first.stats.new_tokens, second.stats.new_tokens) == (round_ * 10 * (2 + 1 + 2), round_ * 10 * (1 + 3))


def test_bits_do_not_depend_on_which_lane_is_faster(params, monkeypatch):
    wanted = serve(make_lanes(params), REQUESTS)
    engine = make_lanes(params)
    slow, decode = engine._lanes[0], local.LocalEngine._decode

    def decode_slowly(self):
        time.sleep(0.02 if self is slow else 0)
        return decode(self)

    monkeypatch.setattr(local.LocalEngine, "_decode", decode_slowly)
    for got, before in zip(serve(engine, REQUESTS), wanted, strict=True):
        for each, other in zip(got, before, strict=True):
            np.testing.assert_array_equal(each.logprobs, other.logprobs)


def test_weights_are_shared_and_swapped_in_every_lane(params):
    engine = make_lanes(params)
    first, second = engine._lanes
    newer = tiny_model.params(seed=1)

    async def swap():
        running = [asyncio.create_task(engine.generate(r)) for r in REQUESTS]
        while not (first.stats.new_tokens and second.stats.new_tokens):
            await asyncio.sleep(0)
        await engine.load(newer, 1)
        assert engine.version == first.version == second.version == 1
        return await asyncio.gather(*running)

    found = [c for answers in asyncio.run(swap()) for c in answers]
    assert first._params is second._params
    assert {span.version for c in found for span in c.version_spans} == {0, 1}
    again = serve(engine, REQUESTS)
    for got, wanted in zip(again, serve(make_engine(ARCH, newer), REQUESTS), strict=True):
        for each, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(each.tokens, other.tokens)


def test_a_cancelled_request_disturbs_no_other(params):
    engine = make_lanes(params)

    async def cancel_one():
        running = [asyncio.create_task(engine.generate(r)) for r in REQUESTS]
        while not engine.stats.new_tokens:
            await asyncio.sleep(0)
        running[0].cancel()
        return await asyncio.gather(*running, return_exceptions=True)

    gone, *others = asyncio.run(cancel_one())
    assert isinstance(gone, EngineError | asyncio.CancelledError)
    for got, wanted in zip(others, serve(make_engine(ARCH, params), REQUESTS)[1:], strict=True):
        for each, other in zip(got, wanted, strict=True):
            assert_same(each, other)
            assert each.stop_reason is not StopReason.ABORT
    assert engine._asked == [0, 0]


def test_a_lane_that_fails_leaves_the_others_alone(params, monkeypatch):
    engine = make_lanes(params)
    decode = local.LocalEngine._decode

    def fail(self):
        if self is engine._lanes[0]:
            raise MemoryError("no more")
        return decode(self)

    with monkeypatch.context() as broken:
        broken.setattr(local.LocalEngine, "_decode", fail)

        async def ask_all():
            return await asyncio.gather(*(engine.generate(r) for r in REQUESTS), return_exceptions=True)

        found = asyncio.run(ask_all())
    wanted = serve(make_engine(ARCH, params), REQUESTS)
    failed = [isinstance(answers, EngineError) for answers in found]
    assert failed == [True, False, False, True, True]
    for answers, others, bad in zip(found, wanted, failed, strict=True):
        for each, other in zip(() if bad else answers, () if bad else others, strict=True):
            assert_same(each, other)
    for answers, others in zip(serve(engine, REQUESTS), wanted, strict=True):
        for each, other in zip(answers, others, strict=True):
            assert_same(each, other)


def test_weights_that_one_lane_does_not_take_are_not_the_version_served(params, monkeypatch):
    engine = make_lanes(params)

    async def refuse(weights, version):
        raise EngineError("no room")

    monkeypatch.setattr(engine._lanes[0], "load", refuse)
    with pytest.raises(EngineError, match="no room"):
        asyncio.run(engine.load(tiny_model.params(seed=1), 1))
    assert (engine.version, engine._lanes[1].version) == (0, 1)


def test_engines_that_share_it_compile_a_program_one_after_the_other():
    first, inside, most = local.FirstDispatch(), [], []
    together = threading.Barrier(3, timeout=60)

    def compiling(_):
        with first("program"):
            inside.append("program")
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    def compiled(_):
        with first("program"):
            together.wait()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(compiling, range(3)))
        assert max(most) == 1
        list(threads.map(compiled, range(3)))
