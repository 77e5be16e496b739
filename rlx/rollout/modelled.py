"""Engines that take the time of real ones and write tokens that mean nothing, for `rlx simulate`.

An event is a request's beginning or end, never a token: the requests of an engine share it equally, so a request of W
tokens ends when the engine has decoded W steps since it began. That is processor sharing with a rate that depends on
how many run; the steps are the "virtual time" of fair queueing (Parekh and Gallager 1993).
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.config.simulation import SimulatedEngines
from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused
from rlx.rollout.modelled_sessions import RESPONSE_TAG, Work
from rlx.types import StopReason, VersionSpan

NO_LOGPROBS = np.zeros(1 << 16, np.float32)  # certain tokens: log-probs of 0
ROUNDING = 1e-6  # steps by which sums of floats may miss a whole one
RESOLUTION = 1e-6  # s by which a timer may come too early, `rlx.rollout.virtual`


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """One response from being asked for to its end."""

    done: asyncio.Future[Completion]
    prompt: int  # tokens
    fresh: int  # of these, what must be prefilled
    tag: int
    length: int  # tokens to write
    stop: StopReason
    start: float = -1.0  # the engine's steps when it began; below 0: it waits
    end: float = 0.0  # the engine's steps when it ends
    spans: tuple[VersionSpan, ...] = ()

    @property
    def marked(self) -> int:
        """Tokens whose version is written down."""
        return self.spans[-1].end if self.spans else 0

    def mark(self, written: int, version: int) -> None:
        """The tokens up to `written` that have no version yet are of this one."""
        if written > self.marked:
            self.spans = (*self.spans, VersionSpan(version, self.marked, written))


class ModelledEngine:
    """A `Replica`. `on_change` is told by how many the running requests became more or fewer."""

    def __init__(
        self,
        name: str,
        speed: SimulatedEngines,
        work: Work,
        *,
        admission: int,
        context: int,
        version: int = 0,
        on_change: Callable[[int], None] = lambda change: None,
    ):
        self.name, self.admission, self.version = name, admission, version
        self.slowdown = 1.0  # factor on its seconds; see `slow_down`
        self.down = False
        self._speed, self._work, self._context, self._on_change = speed, work, context, on_change
        self._steps = 0.0  # decoded since the beginning, by each of the running requests
        self._at = 0.0  # s, when `_steps` was that
        self._busy_until = 0.0  # s: prefill and loading go before decoding
        self._ending: list[tuple[float, int, _Job]] = []  # a heap of the running requests by their end
        self._order = itertools.count()
        self._running = 0
        self._queue: deque[_Job] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._cached: dict[int, int] = {}  # tokens known, by the tag of the task or the last response

    # -------------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: Request) -> list[Completion]:
        if self.down:
            raise EngineError(f"{self.name} is down", reason="down")
        jobs = [self._job(request, seed) for seed in request.seeds]
        for job in jobs:
            self._queue.append(job)
        self._admit()
        try:
            return [await job.done for job in jobs]
        finally:
            if not all(job.done.done() and not job.done.cancelled() for job in jobs):
                self._drop(jobs)

    def _job(self, request: Request, seed: int) -> _Job:
        prompt = request.prompt
        room = min(request.max_new_tokens, self._context - len(prompt))
        if room < 1:
            raise RequestRefused(
                f"request {request.id}: a prompt of {len(prompt)} tokens fills a context of {self._context}"
            )
        tag, last = self._work.next_tag(), int(prompt[-1])
        if last >= RESPONSE_TAG:  # it goes on where another engine failed
            tag, wanted, known = last, self._work.unfinished[last], 0
        else:
            wanted = self._work.response_length(int(prompt[0]), seed)
            before = len(prompt) - 1 - last  # the last token before the observation, if there is one
            known = self._cached.get(int(prompt[max(before, 0)]), 0)
            if self._speed.prefix_cache and before < 0:
                self._cached[int(prompt[0])] = len(prompt)  # the other samples of the task find it
        stop = StopReason.STOP if wanted <= room else StopReason.LENGTH
        future = asyncio.get_running_loop().create_future()
        return _Job(future, len(prompt), max(1, len(prompt) - known), tag, min(wanted, room), stop)

    def _admit(self) -> None:
        self._advance()
        while self._queue and self._running < self.admission:
            job = self._queue.popleft()
            self._running += 1
            self._on_change(1)
            self._occupy(job.fresh / self._speed.prefill_tokens_per_s * self.slowdown)
            job.start = self._steps
            held = self._speed.request_seconds / (self._step_seconds() / self.slowdown)  # in steps
            job.end = job.start + job.length + held
            heapq.heappush(self._ending, (job.end, next(self._order), job))
        self._arm()

    def _finish(self, job: _Job) -> None:
        self._release()
        job.mark(job.length, self.version)
        self._work.unfinished.pop(job.tag, None)
        if self._speed.prefix_cache:
            self._cached[job.tag] = job.prompt + job.length
        tokens = np.full(job.length, job.tag, np.int32)
        logprobs = NO_LOGPROBS[: job.length] if job.length <= len(NO_LOGPROBS) else np.zeros(job.length, np.float32)
        if not job.done.done():
            job.done.set_result(Completion(tokens, logprobs, None, job.spans, job.stop))

    def _drop(self, jobs: list[_Job]) -> None:
        """Requests that nobody waits for any more free their slots."""
        self._advance()
        gone = {id(job) for job in jobs}
        self._queue = deque(job for job in self._queue if id(job) not in gone)
        kept = [entry for entry in self._ending if id(entry[2]) not in gone]
        for _ in range(len(self._ending) - len(kept)):
            self._release()
        self._ending = kept
        heapq.heapify(self._ending)
        self._disarm()
        self._admit()

    def _release(self) -> None:
        self._running -= 1
        self._on_change(-1)

    # ------------------------------------------------------------------------------------------------------------ time

    def _step_seconds(self) -> float:
        speed = self._speed
        return (speed.step_seconds + speed.step_seconds_per_request * self._running) * self.slowdown

    def _advance(self) -> None:
        """Brings `_steps` up to now. Before the number of running requests changes, or their speed."""
        now = asyncio.get_running_loop().time()
        decoded = now - max(self._at, min(self._busy_until, now))
        if decoded > 0 and self._running:
            self._steps += decoded / self._step_seconds()
        self._at = now

    def _occupy(self, seconds: float) -> None:
        """No decoding for so long, after what it is busy with already."""
        self._busy_until = max(self._busy_until, self._at) + seconds

    def _arm(self) -> None:
        """A timer for the next end. One that comes too early sets itself again."""
        if not self._ending:
            return
        wait = max(0.0, self._ending[0][0] - self._steps) * self._step_seconds()
        when = max(self._at, self._busy_until) + wait
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        while self._ending and (self._ending[0][0] - self._steps) * self._step_seconds() <= RESOLUTION:
            self._finish(heapq.heappop(self._ending)[2])
        self._admit()

    # ------------------------------------------------------------------------------------------ weights, speed, faults

    async def load(self, weights: Any, version: int, /) -> None:
        """Writing stops for load_seconds; then the caches of the running requests are filled anew."""
        if self.down:
            raise EngineError(f"{self.name} is down", reason="down")
        self._advance()
        self._occupy(self._speed.load_seconds)
        await asyncio.sleep(self._speed.load_seconds)
        if self.down:
            raise EngineError(f"{self.name} went down while it loaded version {version}", reason="down")
        self._advance()
        refilled = 0
        for _, _, job in self._ending:
            written = self._written(job)
            job.mark(written, self.version)
            refilled += job.prompt + written
        self.version = version
        self._cached.clear()
        self._occupy(refilled / self._speed.prefill_tokens_per_s * self.slowdown)
        self._arm()

    def _written(self, job: _Job) -> int:
        return min(job.length, int(self._steps - job.start + ROUNDING))

    def slow_down(self, factor: float) -> None:
        """All its seconds but those of loading take `factor` times as long from here on."""
        self._advance()
        self.slowdown = factor
        self._disarm()
        self._arm()

    def fail(self) -> None:
        """It dies; whoever waits for it gets what had been written."""
        self._advance()
        self.down = True
        self._disarm()
        running = [entry[2] for entry in self._ending]
        for job in [*running, *self._queue]:
            partial = self._partial(job) if job.start >= 0 else None
            if not job.done.done():
                parts = () if partial is None else (partial,)
                job.done.set_exception(EngineError(f"{self.name} died", reason="died", partial=parts))
                job.done.exception()  # of a request's several samples only one is waited for
        self._ending, self._queue = [], deque()
        for _ in running:
            self._release()

    def recover(self) -> None:
        """It is back, and must be given weights before it serves again."""
        self.down = False
        self._cached.clear()
        self._busy_until = 0.0

    def _partial(self, job: _Job) -> Completion | None:
        written = self._written(job)
        if not 0 < written < job.length:
            return None
        job.mark(written, self.version)
        self._work.unfinished[job.tag] = job.length - written
        tokens = np.full(written, job.tag, np.int32)
        return Completion(tokens, np.zeros(written, np.float32), None, job.spans, StopReason.ABORT)
