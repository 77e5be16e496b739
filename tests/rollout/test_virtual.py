"""The clock jumps, the order is the one of real time, and whoever waits in vain is named."""

from __future__ import annotations

import asyncio
import random
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rollout import virtual
from rlx.rollout.virtual import DeadlockError, VirtualTimeError


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_passes_at_once():
    async def main():
        await asyncio.sleep(365 * 86_400.0)
        return now()

    assert virtual.run(main()) == pytest.approx(365 * 86_400.0)


def test_every_run_starts_at_zero():
    async def main():
        start = now()
        await asyncio.sleep(5)
        return start

    assert [virtual.run(main()) for _ in range(2)] == [0.0, 0.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=30))
def test_sleepers_wake_in_the_order_of_their_times(delays):
    async def main():
        woken = []

        async def sleeper(index, delay):
            await asyncio.sleep(delay)
            woken.append((now(), index))

        await asyncio.gather(*(sleeper(i, d) for i, d in enumerate(delays)))
        return woken

    woken = virtual.run(main())
    assert [t for t, _ in woken] == sorted(t for t, _ in woken)
    assert all(abs(t - delays[i]) <= 2e-6 for t, i in woken)
    distinct = [i for i, d in enumerate(delays) if all(abs(d - e) > 1e-5 for j, e in enumerate(delays) if j != i)]
    assert [i for _, i in woken if i in distinct] == sorted(distinct, key=lambda i: delays[i])
    assert sorted(i for _, i in woken) == list(range(len(delays)))


@pytest.mark.parametrize("start", [0.0, 1e5, 1e9])
def test_short_waits_end_at_any_time_of_the_clock(start):
    async def main():
        await asyncio.sleep(start)
        for _ in range(100):
            await asyncio.sleep(1e-3)
        return now() - start

    assert virtual.run(main()) == pytest.approx(0.1, rel=1e-3)


def test_limits_are_kept_in_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        at_limit = now()
        async with asyncio.timeout(30):
            await asyncio.sleep(29)
        return at_limit, now()

    assert virtual.run(main()) == pytest.approx((30.0, 59.0))


def test_queues_and_locks_work():
    async def main():
        queue: asyncio.Queue[int] = asyncio.Queue(2)
        got = []

        async def produce():
            for i in range(5):
                await asyncio.sleep(1)
                await queue.put(i)

        async def consume():
            for _ in range(5):
                got.append((await queue.get(), now()))
                await asyncio.sleep(10)

        await asyncio.gather(produce(), consume())
        return got

    items, times = zip(*virtual.run(main()))
    assert items == (0, 1, 2, 3, 4)
    assert times == pytest.approx((1.0, 11.0, 21.0, 31.0, 41.0))


def trace(seed: int) -> list[tuple[float, int]]:
    draw, seen = random.Random(seed), []

    async def worker(index, lock):
        for _ in range(5):
            await asyncio.sleep(draw.expovariate(1.0))
            async with lock:
                seen.append((now(), index))
                await asyncio.sleep(draw.random() * 0.1)

    async def main():
        lock = asyncio.Semaphore(3)
        await asyncio.gather(*(worker(i, lock) for i in range(20)))

    virtual.run(main())
    return seen


def test_the_same_seed_gives_the_same_trace():
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


async def waits_for(event):
    await event.wait()


def test_a_deadlock_names_who_waits_and_where():
    async def main():
        event = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(waits_for(event))
            await asyncio.sleep(7)

    with pytest.raises(DeadlockError) as raised:
        virtual.run(main())
    message = str(raised.value)
    assert "at 7 s" in message
    (line,) = [line for line in message.splitlines() if "waits_for" in line]
    assert line.strip().startswith("3 at waits_for (test_virtual.py:")
    assert "Event.wait (locks.py:" in line
    assert any("main" in line and "TaskGroup.__aexit__" in line for line in message.splitlines())


def test_a_long_list_of_waiting_tasks_is_cut():
    async def main():
        events = [asyncio.Event() for _ in range(30)]
        # Every one of these coroutines has a name, and so a place, of its own.
        source = "".join(f"async def wait_{i}(event):\n    await event.wait()\n" for i in range(30))
        names: dict = {}
        exec(source, names)
        await asyncio.gather(*(names[f"wait_{i}"](event) for i, event in enumerate(events)))

    with pytest.raises(DeadlockError, match="and at 11 other places"):
        virtual.run(main())


def test_turning_in_circles_is_a_deadlock(monkeypatch):
    monkeypatch.setattr(virtual, "SPIN_LIMIT", 1000)

    async def spins():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(DeadlockError, match=r"(?s)1,000 rounds at 0 s.*spins"):
        virtual.run(spins())


def test_many_events_at_one_moment_are_no_deadlock(monkeypatch):
    monkeypatch.setattr(virtual, "SPIN_LIMIT", 1000)

    async def main():
        for _ in range(5):
            for _ in range(900):
                await asyncio.sleep(0)
            await asyncio.sleep(1)
        return now()

    assert virtual.run(main()) == 5


@pytest.mark.parametrize("blocking", [lambda: asyncio.to_thread(sum, [1]), lambda: asyncio.open_connection("::1", 1)])
def test_threads_and_sockets_are_refused(blocking):
    async def main():
        await blocking()

    with pytest.raises(VirtualTimeError, match="real time"):
        virtual.run(main())


def test_a_file_descriptor_is_refused():
    async def main():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            asyncio.get_running_loop().add_reader(ours, print)

    with pytest.raises(VirtualTimeError, match="real time"):
        virtual.run(main())


def test_a_call_from_another_thread_is_refused_and_one_from_the_own_is_not():
    async def main():
        loop, refused, called = asyncio.get_running_loop(), [], asyncio.Event()

        def other():
            try:
                loop.call_soon_threadsafe(print)
            except VirtualTimeError as error:
                refused.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(called.set)
        await called.wait()
        return refused

    assert "another thread" in str(virtual.run(main())[0])


def test_an_exception_of_the_coroutine_comes_through():
    async def main():
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        virtual.run(main())


def test_left_over_tasks_are_cancelled():
    ended = []

    async def background():
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(now())

    async def main():
        task = asyncio.create_task(background())
        await asyncio.sleep(1)
        return task

    task = virtual.run(main())
    assert task.cancelled()
    assert ended == [1.0]
