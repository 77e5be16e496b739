"""Engines of a run are let go whatever fails, and a failure of their keepers is said when it happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlx import serving
from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_http import Server, SglangHttp


class Closed:
    """Notes that it was closed, and fails then where it is told to."""

    def __init__(self, closed: list[str], name: str, fails: bool = False):
        self.closed, self.name, self.fails = closed, name, fails

    async def close(self, *exception: object) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError(f"{self.name} does not close")

    __aexit__ = close


def fail() -> None:
    raise OSError("not let go")


def test_the_run_s_own_error_goes_on():
    with pytest.raises(KeyError) as caught, serving._ending(fail):
        raise KeyError("of the run")
    assert "not let go" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="not let go"), serving._ending(fail):
        pass


def test_all_is_closed_where_one_does_not():
    closed: list[str] = []
    bridge, engines = Closed(closed, "bridge", fails=True), [Closed(closed, "a", fails=True), Closed(closed, "b")]
    with pytest.raises(OSError, match="does not close"):
        asyncio.run(serving._disconnect(engines, bridge))
    assert sorted(closed) == ["a", "b", "bridge"]
    parts = SimpleNamespace(publisher=Closed(closed, "publisher", fails=True), fleet=Closed(closed, "fleet"))
    with pytest.raises(OSError, match="publisher"):
        asyncio.run(serving._close(parts, []))
    assert closed[3:] == ["publisher", "fleet"]


def test_a_keeper_that_fails_is_reported_when_it_does():
    async def run() -> list[dict[str, object]]:
        said: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: said.append(context))

        async def keep() -> None:
            fail()

        for task in (loop.create_task(keep()), loop.create_task(asyncio.sleep(60))):
            task.add_done_callback(serving._report)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.01)
        return said

    (context,) = asyncio.run(run())
    assert "not let go" in str(context["exception"])


def test_nothing_is_asked_of_a_server_after_its_connections_are_closed():
    async def run() -> SglangHttp:
        http = SglangHttp(Server("http://127.0.0.1:1"))
        await http.close()
        with pytest.raises(EngineError, match="any more") as caught:
            await http.command("/abort_request", {"rid": "late"})
        assert caught.value.reason == "closed"
        return http

    assert asyncio.run(run())._session is None
