"""Modelled engines take the time that queueing theory says, and label every token with the version that wrote it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.config.simulation import DistributionConfig, SimulatedEngines, SimulatedFaults, SimulatedSessions
from rlx.rollout import virtual
from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused, check_completion
from rlx.rollout.modelled import ModelledEngine
from rlx.rollout.modelled_sessions import RESPONSE_TAG, TASK_TAG, Work
from rlx.types import StopReason, VersionSpan

STEP, PER_REQUEST, PREFILL = 0.5, 0.25, 100.0  # s, s, tokens/s: binary fractions, so that sums are exact


def constant(value: float) -> DistributionConfig:
    return DistributionConfig("constant", value, 0.0, ())


SESSIONS = SimulatedSessions(
    tasks=4,
    pass_rate=constant(0.5),
    task_cv=0.0,
    open_seconds=constant(3.0),
    prompt_tokens=constant(10.0),
    turns=constant(3.0),
    response_tokens=DistributionConfig("quantiles", 0.0, 0.0, (1.0, 101.0)),
    tool_tokens=constant(5.0),
    tool_seconds=constant(2.0),
    close_seconds=constant(0.5),
    grade_seconds=constant(1.0),
)
SPEED = SimulatedEngines(
    count=1,
    start_seconds=0.0,
    step_seconds=STEP,
    step_seconds_per_request=PER_REQUEST,
    request_seconds=0.0,
    prefill_tokens_per_s=1e12,
    prefix_cache=False,
    load_seconds=0.0,
)


def work(sessions: SimulatedSessions = SESSIONS, seed: int = 0, faults: SimulatedFaults | None = None) -> Work:
    return Work(sessions, faults or SimulatedFaults(0.0, 0.0, 0.0), seed)


def make_engine(speed: SimulatedEngines = SPEED, *, admission: int = 8, context: int = 4096, name: str = "a", of=None):
    return ModelledEngine(name, speed, of or work(), admission=admission, context=context)


def seed_for(length: int) -> int:
    """A seed whose response has this many tokens: lengths are uniform from 1 to 101."""
    return int((length - 1) / 100 * 2**32) + 2**19


def request(length: int, prompt: Sequence[int] | None = None, most: int = 1000) -> Request:
    tokens = np.array(prompt or [TASK_TAG, 2], np.int32)
    return Request("r", tokens, (seed_for(length),), most, 1.0)


async def timed(engine: ModelledEngine, asked: Request, after: float = 0.0) -> tuple[float, Completion]:
    """When the answer came, and the answer."""
    await asyncio.sleep(after)
    (answer,) = await engine.generate(asked)
    check_completion(asked, answer)
    return asyncio.get_running_loop().time(), answer


def together(engine: ModelledEngine, *jobs: tuple[int, float], most: int = 1000) -> list[tuple[float, Completion]]:
    """Requests of (length, time of asking)."""

    async def main():
        return await asyncio.gather(*(timed(engine, request(n, most=most), at) for n, at in jobs))

    return virtual.run(main())


# --------------------------------------------------------------------------------------------------------------- speed


def test_one_request_takes_its_steps():
    ((at, answer),) = together(make_engine(), (20, 0.0))
    assert len(answer.tokens) == 20
    assert at == pytest.approx(20 * (STEP + PER_REQUEST))
    assert answer.stop_reason is StopReason.STOP


def test_requests_share_the_engine():
    """One of 10 and one of 30 tokens: 10 steps with two of them, then 20 with one."""
    (short, _), (long, _) = together(make_engine(), (10, 0.0), (30, 0.0))
    assert short == pytest.approx(10 * (STEP + 2 * PER_REQUEST))
    assert long == pytest.approx(short + 20 * (STEP + PER_REQUEST))


def test_one_that_comes_later_slows_the_first_one():
    """After 7.5 s the first has written 10 of 30; both then write 15 together, the first 5 more alone."""
    (first, _), (second, _) = together(make_engine(), (30, 0.0), (15, 7.5))
    assert second == pytest.approx(7.5 + 15 * (STEP + 2 * PER_REQUEST))
    assert first == pytest.approx(second + 5 * (STEP + PER_REQUEST))


def test_beyond_admission_they_wait_in_turn():
    ends = [at for at, _ in together(make_engine(admission=1), (10, 0.0), (20, 0.0), (5, 0.0))]
    assert ends == pytest.approx([7.5, 22.5, 26.25])


def by_steps(jobs: Sequence[tuple[int, float]], admission: int, dt: float) -> list[float]:
    """The same engine, simulated in small steps of time."""
    left, waiting, running = [float(n) for n, _ in jobs], [], []
    ends = [0.0] * len(jobs)
    now, order = 0.0, sorted(range(len(jobs)), key=lambda i: jobs[i][1])
    while any(end == 0.0 for end in ends):
        while order and jobs[order[0]][1] <= now + 1e-9:
            waiting.append(order.pop(0))
        while waiting and len(running) < admission:
            running.append(waiting.pop(0))
        rate = 1 / (STEP + PER_REQUEST * len(running)) if running else 0.0
        now += dt
        for i in list(running):
            left[i] -= rate * dt
            if left[i] <= 0:
                ends[i] = now
                running.remove(i)
    return ends


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40).map(float)), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_it_agrees_with_a_simulation_in_small_steps(jobs, admission):
    dt = 1 / 128
    jobs = [(n, at + i * dt) for i, (n, at) in enumerate(jobs)]  # at one moment their order would be anyone's guess
    ends = [at for at, _ in together(make_engine(admission=admission), *jobs)]
    assert ends == pytest.approx(by_steps(jobs, admission, dt), abs=dt * (2 * len(jobs) + 2))


def test_prefill_stops_decoding():
    """The second prompt of 1,000 tokens takes 10 s, in which the first request writes nothing."""
    engine = make_engine(dataclasses.replace(SPEED, prefill_tokens_per_s=PREFILL))

    async def main():
        second = request(4, [TASK_TAG + 1, *[1000] * 999])
        return await asyncio.gather(timed(engine, request(10)), timed(engine, second, 3.0))

    (first, _), (second, _) = virtual.run(main())
    before = (3.0 - 2 / PREFILL) / (STEP + PER_REQUEST)  # steps of the first until then
    assert second == pytest.approx(13.0 + 4 * (STEP + 2 * PER_REQUEST))
    assert first == pytest.approx(second + (10 - before - 4) * (STEP + PER_REQUEST))


def test_the_prefix_cache_spares_what_is_known_until_weights_are_loaded():
    speed = dataclasses.replace(SPEED, prefill_tokens_per_s=PREFILL, prefix_cache=True)
    prefix = [TASK_TAG, *[100] * 99]

    async def main():
        engine, took = make_engine(speed), []

        async def ask(prompt):
            start = asyncio.get_running_loop().time()
            at, answer = await timed(engine, request(1, prompt))
            took.append((at - start - STEP - PER_REQUEST) * PREFILL)  # tokens prefilled
            return [*prompt, *answer.tokens.tolist()]

        so_far = await ask(prefix)
        await ask(prefix)  # another sample of the task
        so_far = await ask([*so_far, *[50] * 50])  # the next turn of the first
        await engine.load(None, 1)
        await ask([*so_far, *[50] * 50])
        return took

    assert virtual.run(main()) == pytest.approx([100, 1, 50, 202], abs=1e-6)


def test_without_a_prefix_cache_everything_is_prefilled_again():
    engine = make_engine(dataclasses.replace(SPEED, prefill_tokens_per_s=PREFILL))

    async def main():
        return [(await timed(engine, request(1, [TASK_TAG, *[100] * 99])))[0] for _ in range(2)]

    first, second = virtual.run(main())
    assert second == pytest.approx(2 * first)


def test_a_request_may_hold_its_slot_for_longer():
    ((at, _),) = together(make_engine(dataclasses.replace(SPEED, request_seconds=3.0)), (20, 0.0))
    assert at == pytest.approx(20 * (STEP + PER_REQUEST) + 3.0)


@pytest.mark.parametrize("step", [1e-9, 1e-3, 1e3])
def test_steps_of_any_length_come_to_an_end(step):
    """Beside many short steps a float's resolution shows."""
    speed = dataclasses.replace(SPEED, step_seconds=step, step_seconds_per_request=0.0, request_seconds=0.0875)
    ends = [at for at, _ in together(make_engine(speed), *((20, 17295.4 + 0.01 * i) for i in range(8)))]
    assert ends == pytest.approx([17295.4 + 0.01 * i + 20 * step + 0.0875 for i in range(8)], abs=1e-3)


def test_a_slowed_engine_takes_longer_from_then_on():
    engine = make_engine()

    async def main():
        job = asyncio.create_task(timed(engine, request(20)))
        await asyncio.sleep(7.5)  # 10 tokens
        engine.slow_down(2.0)
        return (await job)[0]

    assert virtual.run(main()) == pytest.approx(7.5 + 10 * 2 * (STEP + PER_REQUEST))


def test_it_says_how_many_run():
    changes: list[int] = []
    engine = ModelledEngine("a", SPEED, work(), admission=2, context=100, on_change=changes.append)
    together(engine, (5, 0.0), (5, 0.0), (5, 0.0))
    assert sum(changes) == 0
    assert changes.count(1) == 3
    assert max(np.cumsum(changes)) == 2


# ----------------------------------------------------------------------------------------------------------- responses


def test_limits_cut_responses():
    ((_, answer),) = together(make_engine(), (50, 0.0), most=20)
    assert (len(answer.tokens), answer.stop_reason) == (20, StopReason.LENGTH)
    ((_, answer),) = together(make_engine(context=12), (50, 0.0))
    assert (len(answer.tokens), answer.stop_reason) == (10, StopReason.LENGTH)


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(RequestRefused, match="fills a context of 2"):
        together(make_engine(context=2), (5, 0.0))


def test_the_same_seed_gives_the_same_length_and_responses_have_numbers_of_their_own():
    answers = [answer for _, answer in together(make_engine(), (7, 0.0), (7, 0.0))]
    assert [len(a.tokens) for a in answers] == [7, 7]
    first, second = (set(a.tokens.tolist()) for a in answers)
    assert len(first) == len(second) == 1
    assert first != second
    assert min(first | second) >= RESPONSE_TAG


def test_several_samples_of_one_request():
    asked = Request("r", np.array([TASK_TAG, 2], np.int32), (seed_for(3), seed_for(9)), 100, 1.0)

    async def main():
        return await make_engine().generate(asked)

    assert [len(a.tokens) for a in virtual.run(main())] == [3, 9]


# -------------------------------------------------------------------------------------------------- versions and faults


def test_tokens_are_of_the_version_that_wrote_them():
    """10 tokens of version 0, then a load of 4 s, then the rest under version 1."""
    engine = make_engine(dataclasses.replace(SPEED, load_seconds=4.0))

    async def main():
        job = asyncio.create_task(timed(engine, request(20)))
        await asyncio.sleep(10 * (STEP + PER_REQUEST) + 0.1)
        await engine.load(None, 1)
        return await job

    at, answer = virtual.run(main())
    assert answer.version_spans == (VersionSpan(0, 0, 10), VersionSpan(1, 10, 20))
    assert at == pytest.approx(20 * (STEP + PER_REQUEST) + 4.0)
    assert engine.version == 1


def test_loads_before_the_first_and_after_the_last_token_leave_no_trace():
    engine = make_engine(dataclasses.replace(SPEED, load_seconds=4.0))

    async def main():
        loading = asyncio.create_task(engine.load(None, 1))
        await asyncio.sleep(1.0)
        _, answer = await timed(engine, request(5))
        await loading
        await engine.load(None, 2)
        return answer

    assert virtual.run(main()).version_spans == (VersionSpan(1, 0, 5),)


def test_a_load_makes_running_requests_fill_their_caches_again():
    speed = dataclasses.replace(SPEED, prefill_tokens_per_s=PREFILL)

    async def main(load):
        engine = make_engine(speed)
        job = asyncio.create_task(timed(engine, request(20)))
        await asyncio.sleep(2 / PREFILL + 10 * (STEP + PER_REQUEST))
        if load:
            await engine.load(None, 1)
        return (await job)[0]

    assert virtual.run(main(True)) == pytest.approx(virtual.run(main(False)) + 12 / PREFILL)


def test_a_cancelled_request_frees_its_slot():
    engine = make_engine(admission=1)

    async def main():
        jobs = [asyncio.create_task(timed(engine, request(100))) for _ in range(2)]
        last = asyncio.create_task(timed(engine, request(10)))
        await asyncio.sleep(7.5)
        for job in jobs:
            job.cancel()
        return (await last)[0]

    assert virtual.run(main()) == pytest.approx(7.5 + 10 * (STEP + PER_REQUEST))


def test_a_dying_engine_gives_what_it_had_and_the_rest_is_written_elsewhere():
    shared = work()
    dying, other = make_engine(of=shared), make_engine(of=shared, name="b")

    async def main():
        asked = request(20)
        job = asyncio.create_task(dying.generate(asked))
        waiting = asyncio.create_task(dying.generate(request(20)))
        await asyncio.sleep(10 * (STEP + 2 * PER_REQUEST) + 0.1)
        dying.fail()
        with pytest.raises(EngineError, match="died") as error:
            await job
        with pytest.raises(EngineError, match="died"):
            await waiting
        with pytest.raises(EngineError, match="down"):
            await dying.generate(asked)
        with pytest.raises(EngineError, match="down"):
            await dying.load(None, 1)
        (part,) = error.value.partial
        rest = dataclasses.replace(asked, prompt=np.concatenate([asked.prompt, part.tokens]), seeds=(1,))
        other.fail()
        other.recover()
        return part, (await timed(other, rest))[1]

    part, rest = virtual.run(main())
    assert (len(part.tokens), part.stop_reason, part.version_spans) == (10, StopReason.ABORT, (VersionSpan(0, 0, 10),))
    assert len(rest.tokens) == 10
    assert set(rest.tokens.tolist()) == set(part.tokens.tolist())


def test_an_engine_that_is_back_serves_at_its_old_speed():
    engine = make_engine()

    async def main():
        job = asyncio.create_task(engine.generate(request(50)))
        await asyncio.sleep(3.0)
        engine.fail()
        with pytest.raises(EngineError):
            await job
        await asyncio.sleep(100.0)
        engine.recover()
        await engine.load(None, 3)
        return await timed(engine, request(10))

    at, answer = virtual.run(main())
    assert at == pytest.approx(103.0 + 10 * (STEP + PER_REQUEST))
    assert answer.version_spans == (VersionSpan(3, 0, 10),)


def test_an_engine_that_dies_while_it_loads_has_not_loaded():
    engine = make_engine(dataclasses.replace(SPEED, load_seconds=4.0))

    async def main():
        loading = asyncio.create_task(engine.load(None, 1))
        await asyncio.sleep(1.0)
        engine.fail()
        await loading

    with pytest.raises(EngineError, match="went down while it loaded version 1"):
        virtual.run(main())
    assert engine.version == 0
