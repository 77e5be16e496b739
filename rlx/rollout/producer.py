"""Tasks in, graded groups out, without end: what generates while the trainer trains.

Every sample is a session of its own. It is submitted as soon as the limits allow, whatever its group's other samples
do; a group is complete when all its samples have been graded, or failed for good. Every token is booked when it
arrives, and again wherever it goes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Callable

from rlx.envs.grading import Outcome
from rlx.rollout.budgets import Books, Budgets, Gauge
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import MakeEnvironment, Sampling, turn_seed
from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused, raise_if_cancelled
from rlx.rollout.fates import span_ages
from rlx.rollout.fleet import Fleet
from rlx.rollout.journal import Entry, Journal
from rlx.rollout.session import EnvironmentFailed, Guarded, play
from rlx.rollout.transcript import Transcript, Verdict
from rlx.rollout.work import OpenGroup, Session, holding, number_again
from rlx.types import Count, Group, StopReason, Task


@dataclasses.dataclass(frozen=True)
class ProducerOptions:
    budgets: Budgets
    gradings: int  # at once
    session_token_limit: int = 0  # tokens, 0 = none
    environment_timeout_s: float = 600.0  # of one call
    retries: int = 3  # of a response, of a session, of a grading
    backoff_s: float = 1.0  # doubles with each retry
    failure_limit: int = 64  # samples in a row that failed for good end the run


class TooManyFailures(RuntimeError):
    """No sample for a long time: the run cannot go on. Caused by the last failure."""


class Producer:
    """A context manager: it produces from entering to leaving. What ends it reaches whoever waits in `buffer.take`.

    Args:
      environments: a fresh environment for each session.
      next_task: the endless stream of (group number, task); numbers are below 2**40 and never come twice.
    """

    def __init__(
        self,
        fleet: Fleet,
        environments: MakeEnvironment,
        next_task: Callable[[], tuple[int, Task]],
        buffer: Buffer,
        books: Books,
        sampling: Sampling,
        options: ProducerOptions,
        journal: Journal | None = None,
    ):
        self.fleet, self.environments, self.next_task, self.buffer = fleet, environments, next_task, buffer
        self.books, self.sampling, self.options, self.journal = books, sampling, options, journal
        self.sessions, self.samples, self.grading, self.ungraded = Gauge(), Gauge(), Gauge(), Gauge()
        self.failures: Counter[str] = Counter()  # by kind, those that a retry mended included
        self.groups: dict[int, OpenGroup] = {}
        self.open: dict[tuple[int, int], Session] = {}
        self.resumed: deque[Session] = deque()
        self.returned: deque[tuple[int, Task]] = deque()
        self.finished: dict[int, None] = {}  # numbers of groups that a journal brought
        self._submitting: deque[OpenGroup] = deque()
        self._tasks: dict[Session, asyncio.Task[None]] = {}
        self._failed_in_row = 0
        self._graders = asyncio.Semaphore(options.gradings)
        self._running = False
        buffer.on_change, buffer.on_stale = self._fill, self._try_again

    async def __aenter__(self) -> Producer:
        self._running = True
        self._fill()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End all sessions where they are. What was written by then, if engines say it, is held and can be saved."""
        self._running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def holdings(self) -> dict[str, Count]:
        """What it holds, counted from the sessions and samples themselves."""
        held = Count()
        for group in self.groups.values():
            held = held.plus(holding(group, self.open))
        return {"in_flight": held}

    def requeue(self) -> None:
        """Submit again what was under way when it was saved; before it is entered."""
        self.resumed = deque(self.open.values())
        self._submitting = deque(g for g in self.groups.values() if g.submitted < len(g.samples))

    # ------------------------------------------------------------------------------------------------------ submission

    def _fill(self) -> None:
        """Open sessions as far as the limits allow."""
        limits = self.options.budgets
        while self._running and self.sessions.level < limits.sessions and self.samples.level < limits.samples:
            session = self._next()
            if session is None:
                return
            self.open[session.key] = session
            task = asyncio.get_running_loop().create_task(
                self._run(session, self.samples.enter(), self.sessions.enter())
            )
            self._tasks[session] = task
            task.add_done_callback(lambda task, session=session: self._ended(session, task))

    def _next(self) -> Session | None:
        """The next sample: of those resumed, of a group that has begun, of a new one where the buffer has room."""
        if self.resumed:
            return self.resumed.popleft()
        if not self._submitting:
            if not self.buffer.room_for(len(self.groups)):
                return None
            number, task = self._next_task()
            group = OpenGroup.begin(number, task, self.sampling.seed, self.sampling.group_size)
            self.groups[number] = group
            self._submitting.append(group)
        group = self._submitting[0]
        session = Session(group, group.submitted)
        group.submitted += 1
        if group.submitted == len(group.samples):
            self._submitting.popleft()
        return session

    def _next_task(self) -> tuple[int, Task]:
        while True:
            number, task = self.returned.popleft() if self.returned else self.next_task()
            if number not in self.finished:
                return number, task
            del self.finished[number]

    def _try_again(self, group: Group) -> None:
        self.returned.append((number_again(group.samples[0].group), group.task))

    def _ended(self, session: Session, task: asyncio.Task[None]) -> None:
        del self._tasks[session]
        error = (
            RuntimeError(f"session {session.key} was cancelled from inside") if task.cancelled() else task.exception()
        )
        if self._running and error is not None:
            self._fail(error)
        self._fill()

    def _fail(self, error: BaseException) -> None:
        self._running = False
        self.buffer.fail(error)

    # -------------------------------------------------------------------------------------------------------- a sample

    async def _run(self, session: Session, submitted: float, opened: float) -> None:
        """A sample from its submission to its end, good or bad."""
        try:
            try:
                environment = await self._play(session)
            finally:
                self.sessions.leave(opened)
            self._fill()
            try:
                verdict = await self._grade(session, environment)
            finally:
                await self._release(environment)
        except (EnvironmentFailed, EngineError) as error:
            reason = error.reason if isinstance(error, EnvironmentFailed) else f"engine_{error.reason}"
            self._drop(session, reason, error)
        else:
            self._keep(session, verdict)
        finally:
            self.samples.leave(submitted)

    async def _play(self, session: Session) -> Guarded:
        """Sessions whose environment fails begin anew, those whose engine fails go on with another."""
        for attempt in range(self.options.retries + 1):
            environment = Guarded(self.environments(session.group.task), self.options.environment_timeout_s)
            try:
                stop = await play(
                    environment,
                    session.transcript,
                    lambda transcript: self._respond(session, transcript),
                    self.options.session_token_limit,
                )
                if not session.transcript.num_written:
                    raise _no_room(session)
                session.stop = stop
                return environment
            except BaseException as error:
                await self._release(environment)
                if not isinstance(error, EnvironmentFailed):
                    raise
                self.failures[error.reason] += 1
                if attempt == self.options.retries or error.reason == "prompt_too_long":
                    raise
                self._book_failed(session, error.reason, 0, 0)
                session.transcript = Transcript()
            await asyncio.sleep(self.options.backoff_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _release(self, environment: Guarded) -> None:
        """What a session's environment does while it closes is no longer the session's business."""
        try:
            await environment.close()
        except EnvironmentFailed as error:
            self.failures[error.reason] += 1

    async def _respond(self, session: Session, transcript: Transcript) -> None:
        """Let the policy write the rest of its response, on as many engines as it takes."""
        failures = 0
        while not transcript.answered:
            request = self._request(session, transcript)
            try:
                session.engine, (part,) = await self.fleet.serve(request, session.engine)
            except EngineError as error:
                saved = error.partial[0] if error.partial else None
                if saved is not None and len(saved.tokens):
                    cut = len(saved.tokens) == request.max_new_tokens
                    stop = StopReason.LENGTH if cut else StopReason.ABORT
                    self._write(session, dataclasses.replace(saved, stop_reason=stop))
                raise_if_cancelled(error)
                self.failures[f"engine_{error.reason}"] += 1
                if isinstance(error, RequestRefused):
                    raise
                if saved is not None and len(saved.tokens):
                    continue
                failures += 1
                if failures > self.options.retries:
                    raise
                if failures > 1:  # the first time another engine may do
                    await asyncio.sleep(self.options.backoff_s * 2 ** (failures - 2))
            else:
                self._write(session, part)

    def _request(self, session: Session, transcript: Transcript) -> Request:
        group, turn = session.group, len(transcript.turns) - 1
        written = transcript.turns[-1].num_written
        seed = group.seeds[session.index]
        if turn or written:
            seed = turn_seed(self.sampling.seed, group.number, session.index, turn, written)
        return Request(
            id=f"{group.number}:{group.task.id}:{session.index}:{turn}:{written}",
            prompt=transcript.tokens(),
            seeds=(seed,),
            max_new_tokens=self.sampling.max_new_tokens - written,
            temperature=self.sampling.temperature,
        )

    def _write(self, session: Session, part: Completion) -> None:
        session.transcript.write(part)
        self._book(session, len(part.tokens))

    def _book(self, session: Session, tokens: int) -> None:
        self.books.generated(tokens, int(not session.booked), int(not session.group.booked))
        session.booked = session.group.booked = True

    async def _grade(self, session: Session, environment: Guarded) -> Verdict:
        waits = self.ungraded.enter()
        async with self._graders:
            self.ungraded.leave(waits)
            begun = self.grading.enter()
            try:
                for attempt in range(self.options.retries + 1):
                    try:
                        return await environment.grade(session.transcript)
                    except EnvironmentFailed as error:
                        self.failures[error.reason] += 1
                        if attempt == self.options.retries:
                            raise
                    await asyncio.sleep(self.options.backoff_s * 2**attempt)
                raise AssertionError("the last attempt returns or raises")
            finally:
                self.grading.leave(begun)

    # ------------------------------------------------------------------------------------------------- a sample's end

    def _keep(self, session: Session, verdict: Verdict) -> None:
        group, stop = session.group, verdict.stop_reason or session.stop
        assert stop is not None
        group.samples[session.index] = session.transcript.sample(
            group.task, group.number, session.index, verdict, stop, zero_truncated=self.sampling.zero_reward_truncated
        )
        outcome = verdict.grade.outcome
        if outcome == Outcome.GRADED:
            self._failed_in_row = 0
        else:
            self._count_failure(f"grader_{outcome}", RuntimeError(f"grading failed: {verdict.grade.detail}"))
        self._close(session)

    def _drop(self, session: Session, reason: str, error: BaseException) -> None:
        """The sample failed for good: its tokens are booked, its group goes on without it."""
        group = session.group
        if not session.booked:
            self._book(session, 0)
        last = group.left == 1 and not group.graded().samples
        self._book_failed(session, reason, 1, int(last))
        self._count_failure("", error)
        self._close(session)

    def _book_failed(self, session: Session, reason: str, samples: int, groups: int) -> None:
        transcript = session.transcript
        ages, lengths = span_ages(transcript.version_spans(), self.fleet.version), [transcript.num_written] * samples
        tokens = transcript.num_written
        self.books.move("in_flight", f"failed/{reason}", tokens, samples, groups, ages=ages, lengths=lengths)

    def _count_failure(self, kind: str, error: BaseException) -> None:
        if kind:
            self.failures[kind] += 1
        self._failed_in_row += 1
        if self._failed_in_row >= self.options.failure_limit:
            count = f"{self._failed_in_row} samples in a row failed for good (producer.failure_limit)"
            stopped = TooManyFailures(f"{count}; the last one: {error}")
            stopped.__cause__ = error
            self._fail(stopped)

    def _close(self, session: Session) -> None:
        group = session.group
        del self.open[session.key]
        group.left -= 1
        if group.left:
            return
        del self.groups[group.number]
        done = group.graded()
        if done.samples:
            if self.journal is not None:
                self.journal.append(Entry(group.number, self.books.total, done))
            self.buffer.put(done, self.fleet.version)


def _no_room(session: Session) -> EnvironmentFailed:
    said = f"task {session.group.task.id}: a prompt of {session.transcript.length} tokens leaves no room for a response"
    return EnvironmentFailed("prompt_too_long", f"{said} (producer.session_token_limit)")
