"""SIGTERM becomes Preempted at a safe point and nowhere else."""

import asyncio
import os
import signal

import pytest

from rlx.interrupt import Preempted, Preemption
from rlx.rollout.engine import EngineError, raise_if_cancelled
from tests import tiny_model
from tests.rollout.serving import ask, make_engine
from tests.tiny_model import ARCH


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


async def wait_forever(log):
    log.append("started")
    try:
        await asyncio.Event().wait()
    finally:
        log.append("cleaned up")


def test_work_is_cancelled_at_its_await():
    log = []

    async def work():
        asyncio.get_running_loop().call_soon(terminate)
        await wait_forever(log)

    with Preemption() as preemption, pytest.raises(Preempted):
        preemption.run(work())
    assert log == ["started", "cleaned up"]


def test_work_that_needs_no_await_is_finished():
    async def work():
        terminate()
        return 41

    with Preemption() as preemption:
        assert preemption.run(work()) == 41
        assert preemption.requested
        with pytest.raises(Preempted):
            preemption.check()


def test_nothing_is_begun_after_the_signal():
    log = []

    async def work():
        log.append("started")

    with Preemption() as preemption:
        preemption.check()
        terminate()
        terminate()
        with pytest.raises(Preempted):
            preemption.check()
        with pytest.raises(Preempted):
            preemption.run(work())
    assert log == []


def test_what_must_not_be_left_half_done_is_finished():
    """Whether the signal comes in the middle of it or came before."""

    async def work():
        terminate()
        await asyncio.sleep(0)
        return "whole"

    with Preemption() as preemption:
        assert preemption.finish(work()) == "whole"
        assert preemption.finish(work()) == "whole"
        with pytest.raises(Preempted):
            preemption.check()


def test_the_former_handler_is_restored():
    former = signal.getsignal(signal.SIGTERM)
    seen = []
    try:
        signal.signal(signal.SIGTERM, lambda *_: seen.append("former"))
        with Preemption():
            terminate()
        assert seen == []
        with pytest.raises(KeyError), Preemption():
            raise KeyError
        terminate()
        assert seen == ["former"]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_without_a_signal_results_and_errors_pass():
    async def fails():
        await asyncio.sleep(0)
        raise LookupError("own error")

    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    with Preemption() as preemption:
        assert preemption.run(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(LookupError, match="own error"):
            preemption.run(fails())
        with pytest.raises(asyncio.CancelledError):
            preemption.run(cancels_itself())
        assert not preemption.requested


def test_all_work_of_a_run_is_on_one_loop():
    """What an engine left running goes on in the next call, and ends with the context."""
    log = []

    async def begin():
        return asyncio.get_running_loop(), asyncio.create_task(wait_forever(log))

    async def loop_and_tasks():
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), asyncio.all_tasks()

    with Preemption() as preemption:
        loop, task = preemption.run(begin())
        same, tasks = preemption.run(loop_and_tasks())
        assert same is loop
        assert task in tasks
        assert log == ["started"]
    assert log == ["started", "cleaned up"]
    assert task.cancelled()


def test_a_signal_while_an_engine_decodes():
    """The request is cancelled; leaving the context waits for the dispatch that is under way."""
    engine = make_engine(ARCH, tiny_model.params())

    async def work():
        request = asyncio.create_task(engine.generate(ask(0, 5, 3)))
        while not engine.stats.new_tokens:
            await asyncio.sleep(0)
        terminate()
        try:
            return await request
        except EngineError as error:
            raise_if_cancelled(error)
            raise

    with Preemption() as preemption, pytest.raises(Preempted):
        preemption.run(work())
    assert asyncio.run(engine.generate(ask(1, 5, 2)))[1].tokens.size == 10
