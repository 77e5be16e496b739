"""The engines of a run: who gets which request, who is in service, and what becomes of one that fails.

An engine that dies, hangs or answers nonsense is ejected at once; whoever waited for it is told and asks another one.
It comes back only after it has loaded the current weights. A request goes to the engine in service with the fewest of
them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rlx.rollout.answers import check_answers, check_parts, num_sampled
from rlx.rollout.budgets import Books, Gauge
from rlx.rollout.engine import Completion, EngineError, Replica, Request, RequestRefused
from rlx.rollout.limits import abandon, bounded
from rlx.rollout.routing import LeastLoaded
from rlx.types import StopReason

GRACE_S = 5.0  # for the requests of an ejected engine to end by themselves, with what they had written; and, cancelled
LONGEST_WAIT = 0.1  # between two repairs, of outage_s: an engine that is back within it is found


@dataclasses.dataclass(frozen=True)
class FleetOptions:
    http_admission: int = 0  # requests sent to an engine and not yet answered, 0 = 2 x its admission
    request_timeout_s: float = 1800.0
    load_timeout_s: float = 600.0
    backoff_s: float = 1.0  # before an engine's first repair; doubles with each failure, up to LONGEST_WAIT of outage_s
    outage_s: float = 300.0  # without any engine in service: the run ends


class FleetDown(RuntimeError):
    """No engine is in service, and has not been for `outage_s`: the run cannot go on."""


@dataclasses.dataclass(eq=False)
class Member:
    """An engine and what the fleet knows of it."""

    engine: Replica
    permits: int
    versions: list[int]  # served, oldest first; the last is the current one, or the one that it is loading
    load: int = 0  # permits taken
    running: dict[_Flight, None] = dataclasses.field(default_factory=dict)
    in_service: bool = True
    open: bool = True  # takes new requests
    strikes: int = 0  # failures since its last good answer
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    loading: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


@dataclasses.dataclass(eq=False)
class _Flight:
    """A request from sending to its answer."""

    request: Request
    task: asyncio.Task[list[Completion]]
    ended: asyncio.Future[str]  # "answered", or why it is given up
    first: int  # index in member.versions of what was served when it was sent


class Fleet:
    """An `Engine` made of many. A context manager: leaving it ends its repairs.

    Args:
      weights, version: what every engine serves at the start. They are not asked to load it.
      books: gets the tokens that came and were refused.
    """

    def __init__(
        self, engines: Sequence[Replica], options: FleetOptions, weights: Any, version: int, books: Books
    ) -> None:
        names = [engine.name for engine in engines]
        if not engines or len(set(names)) < len(names):
            raise ValueError(f"a fleet needs engines with names of their own, got {names}")
        self.options, self.books = options, books
        self.weights, self.version = weights, version
        self.members = [Member(e, options.http_admission or 2 * e.admission, [version]) for e in engines]
        self.permits, self.busy, self.queued = Gauge(), Gauge(), Gauge()
        self.ejected: Counter[str] = Counter()  # ejections by reason
        self._by_name = {m.engine.name: m for m in self.members}
        self._free: LeastLoaded[Member] = LeastLoaded()
        self._queue: deque[asyncio.Future[Member]] = deque()
        self._repairs: dict[Member, asyncio.Task[None]] = {}
        self._adrift: dict[asyncio.Task[list[Completion]], None] = {}  # requests that were given up
        self._outage: asyncio.TimerHandle | None = None
        self._down: FleetDown | None = None
        self._last_error: BaseException | None = None
        for member in self.members:
            member.idle.set()
            self._free.set(member, 0)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._outage is not None:
            self._outage.cancel()
        for task in self._repairs.values():
            task.cancel()
        # Those adrift were cancelled when they were given up; once more, and they could not say what they had written.
        tasks = [*self._repairs.values(), *self._adrift]
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)

    @property
    def slots(self) -> int:
        """Requests that run at once when every engine is in service."""
        return sum(m.engine.admission for m in self.members)

    @property
    def in_service(self) -> list[Member]:
        return [m for m in self.members if m.in_service]

    async def generate(self, request: Request) -> list[Completion]:
        return (await self.serve(request))[1]

    async def serve(self, request: Request, prefer: str | None = None) -> tuple[str, list[Completion]]:
        """One attempt on one engine: its name and its answer.

        prefer: the engine that has the prompt's beginning in its cache; it is chosen where it can begin at once.

        Raises:
          RequestRefused: no engine can serve it.
          EngineError: the engine failed, or the request was cancelled; `partial` holds what had been written.
          FleetDown: there has been no engine for too long.
        """
        member = await self._permit(prefer)
        entered = self.permits.enter()
        try:
            return member.engine.name, await self._ask(member, request)
        finally:
            self.permits.leave(entered)
            self._release(member)

    # -------------------------------------------------------------------------------------------------------- permits

    async def _permit(self, prefer: str | None) -> Member:
        """A member with a permit taken on it, first come, first served."""
        if self._down is not None:
            raise self._down
        while True:
            if len(self._free) and not self._queue:
                wanted = self._by_name.get(prefer or "")
                at_once = wanted is not None and wanted in self._free and wanted.load < wanted.engine.admission
                member = wanted if wanted is not None and at_once else self._free.least()
                self._take(member)
                return member
            waiter = asyncio.get_running_loop().create_future()
            self._queue.append(waiter)
            entered = self.queued.enter()
            try:
                member = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._release(waiter.result())
                raise
            finally:
                self.queued.leave(entered)
            if member.open and member.in_service:
                return member
            self._release(member)  # it was closed between the permit and now

    def _take(self, member: Member) -> None:
        if member.load < member.engine.admission:
            self.busy.enter()
        member.load += 1
        member.idle.clear()
        self._place(member)

    def _release(self, member: Member) -> None:
        member.load -= 1
        if member.load < member.engine.admission:
            self.busy.leave()
        if not member.load:
            member.idle.set()
        self._place(member)
        self._hand_out()

    def _place(self, member: Member) -> None:
        if member.in_service and member.open and member.load < member.permits:
            self._free.set(member, member.load)
        else:
            self._free.discard(member)

    def _hand_out(self) -> None:
        while self._queue and len(self._free):
            waiter = self._queue.popleft()
            if not waiter.done():
                member = self._free.least()
                self._take(member)
                waiter.set_result(member)

    # ------------------------------------------------------------------------------------------------------- requests

    async def _ask(self, member: Member, request: Request) -> list[Completion]:
        if member.engine.version != member.versions[-1]:
            raise self._eject(member, "version", f"serves {member.engine.version}, was given {member.versions[-1]}")
        loop = asyncio.get_running_loop()
        task = loop.create_task(member.engine.generate(request))
        flight = _Flight(request, task, loop.create_future(), len(member.versions) - 1)
        task.add_done_callback(lambda _: _end(flight, "answered"))
        timer = loop.call_later(self.options.request_timeout_s, _end, flight, "timeout")
        member.running[flight] = None
        try:
            how = await flight.ended
        except asyncio.CancelledError as cancelled:
            partial = await self._recall(member, flight)
            if partial:
                raise EngineError(
                    f"request {request.id} was cancelled", reason="cancelled", partial=partial
                ) from cancelled
            raise
        finally:
            timer.cancel()
            del member.running[flight]
            if not task.done():
                self._adrift[task] = None
                abandon(task, functools.partial(self._late, request))
        if how == "timeout":
            limit = f"{self.options.request_timeout_s:g} s (producer.request_timeout_s)"
            said = f"request {request.id} had no answer within {limit}"
            raise self._eject(member, "timeout", said)
        if how == "ejected" or task.cancelled():
            raise EngineError(
                f"{member.engine.name} was ejected while it served request {request.id}", reason="ejected"
            )
        return self._judge(member, flight)

    async def _recall(self, member: Member, flight: _Flight) -> tuple[Completion | None, ...]:
        """What had been written of a request that is cancelled, of an engine that says so."""
        flight.task.cancel()
        await asyncio.wait([flight.task], timeout=GRACE_S)
        if not flight.task.done() or flight.task.cancelled():
            return ()
        error = flight.task.exception()
        if error is None:
            self._refuse(flight.request, flight.task.result(), "late")
        return self._usable(member, flight, error.partial) if isinstance(error, EngineError) else ()

    def _judge(self, member: Member, flight: _Flight) -> list[Completion]:
        """The answer, if it is one; everything else takes the engine out of service."""
        error = flight.task.exception()
        if error is None:
            answers = flight.task.result()
            try:
                check_answers(flight.request, answers, member.versions[flight.first :])
            except EngineError as nonsense:
                self._refuse(flight.request, answers, nonsense.reason)
                raise self._eject(member, nonsense.reason, str(nonsense)) from nonsense
            member.strikes = 0 if member.in_service else member.strikes
            if any(c.stop_reason is StopReason.ABORT for c in answers):
                said = f"{member.engine.name} aborted request {flight.request.id}"
                raise EngineError(said, reason="aborted", partial=tuple(answers))
            return answers
        if isinstance(error, RequestRefused) or not isinstance(error, Exception):
            raise error
        reason, partial = "exception", tuple[Completion | None, ...]()
        if isinstance(error, EngineError):
            reason, partial = error.reason, self._usable(member, flight, error.partial)
        raise self._eject(member, reason, f"{type(error).__name__}: {error}", partial) from error

    def _usable(
        self, member: Member, flight: _Flight, parts: tuple[Completion | None, ...]
    ) -> tuple[Completion | None, ...]:
        """What a failed engine had written, if it can be trusted."""
        if not any(parts):
            return ()
        try:
            check_parts(flight.request, parts, member.versions[flight.first :])
        except EngineError as nonsense:
            self._refuse(flight.request, parts, nonsense.reason)
            return ()
        return parts

    def _refuse(self, request: Request, answers: Any, reason: str) -> None:
        """Books what came and is not used."""
        tokens = num_sampled(request, answers)
        self.books.generated(tokens)
        self.books.move("in_flight", f"failed/engine_{reason}", tokens)

    def _late(self, request: Request, task: asyncio.Task[list[Completion]]) -> None:
        """An answer to a request that was given up, or what was written of it."""
        del self._adrift[task]
        if not task.cancelled():
            error = task.exception()
            late = task.result() if error is None else error.partial if isinstance(error, EngineError) else ()
            self._refuse(request, late, "late")

    # --------------------------------------------------------------------------------------------------------- health

    def _eject(
        self, member: Member, reason: str, said: str, partial: tuple[Completion | None, ...] = ()
    ) -> EngineError:
        """Takes the engine out of service; returns the error for whoever asked it."""
        error = EngineError(f"engine {member.engine.name}: {said}", reason=reason, partial=partial)
        self._last_error = error
        if member.in_service:
            self.ejected[reason] += 1
            member.in_service = False
            member.strikes += 1
            self._place(member)
            loop = asyncio.get_running_loop()
            for flight in member.running:
                loop.call_later(GRACE_S, flight.task.cancel)
                loop.call_later(2 * GRACE_S, _end, flight, "ejected")
            self._repairs[member] = loop.create_task(self._repair(member))
            if not self.in_service and self._outage is None:
                self._outage = loop.call_later(self.options.outage_s, self._give_up)
        return error

    def eject(self, member: Member, reason: str, said: str) -> None:
        """Take the engine out of service for what was seen of it elsewhere; it comes back with the current weights."""
        self._eject(member, reason, said)

    async def _repair(self, member: Member) -> None:
        """Until it serves again: a machine that restarts may take longer than anyone would count tries."""
        while True:
            doublings = min(member.strikes - 1, 30)
            await asyncio.sleep(min(self.options.backoff_s * 2**doublings, self.options.outage_s * LONGEST_WAIT))
            try:
                await self.load(member)
            except EngineError as error:
                self._last_error = error
                member.strikes += 1
            else:
                del self._repairs[member]
                self._admit(member)
                return

    def _admit(self, member: Member) -> None:
        member.in_service = member.open = True
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        self._place(member)
        self._hand_out()

    def _give_up(self) -> None:
        said = f"none of {len(self.members)} engines is in service (ejections: {dict(self.ejected)}); the last error: "
        self._down = FleetDown(f"{said}{self._last_error}")
        self._down.__cause__ = self._last_error
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(self._down)

    # ---------------------------------------------------------------------------------------- what a publication needs

    def close(self, member: Member) -> None:
        """No new requests from here on; those that wait go to others, or wait."""
        member.open = False
        self._place(member)

    def reopen(self, member: Member) -> None:
        member.open = True
        self._place(member)
        self._hand_out()

    async def load(self, member: Member) -> None:
        """The current weights, the newest where there are newer ones meanwhile. Raises EngineError."""
        async with member.loading:
            version = None
            while version != self.version:
                weights, version = self.weights, self.version
                member.versions.append(version)
                try:
                    await bounded(member.engine.load(weights, version), self.options.load_timeout_s)
                except Exception as error:
                    said = (
                        f"engine {member.engine.name} did not load version {version}: {type(error).__name__}: {error}"
                    )
                    raise EngineError(said, reason="load") from error
                if member.engine.version != version:
                    said = f"engine {member.engine.name} serves {member.engine.version} after loading {version}"
                    raise EngineError(said, reason="version")

    async def reload(self, member: Member) -> bool:
        """`load`, where it is needed; an engine that fails to is out of service. Says whether it is in service."""
        try:
            if member.in_service and member.versions[-1] != self.version:
                await self.load(member)
        except EngineError as error:
            self._eject(member, "load", str(error))
        return member.in_service


def _end(flight: _Flight, how: str) -> None:
    if not flight.ended.done():
        flight.ended.set_result(how)
