"""Lanes: several embedded engines that look like one, with the samples of one."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from rlx.models import sampler
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


def test_requests_go_to_lanes_in_turn_and_from_the_first_on_once_nothing_runs(params):
    engine = make_lanes(params)
    first, second = engine._lanes
    for round_ in (1, 2):
        serve(engine, REQUESTS[:3])
        assert (first.stats.new_tokens, second.stats.new_tokens) == (round_ * 50, round_ * 10)


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
    assert not engine._running


def test_a_program_that_all_lanes_need_is_compiled_once(params, monkeypatch):
    before = sampler.decode._cache_size()
    at_once, inside, decode = [], [0], sampler.decode

    def counted(*given):
        inside[0] += 1
        at_once.append(inside[0])
        try:
            return decode(*given)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(sampler, "decode", counted)
    monkeypatch.setattr(local, "_dispatched", set())
    other = dataclasses.replace(CONFIG, slots=6, lanes=2, steps_per_dispatch=4)
    weights = local.served(ARCH, params)
    engine = LaneEngine([make_engine(ARCH, weights, lane_config(other)) for _ in range(2)])
    serve(engine, REQUESTS[:2])
    programs = decode._cache_size() - before
    assert len(local._dispatched) == programs > 0
    assert at_once[0] == 1
