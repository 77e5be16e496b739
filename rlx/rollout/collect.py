"""Tasks in, graded groups out: every sample of every task is asked of the engine and judged.

The synchronous form: all requests of a collection are sent at once and in a fixed order, and it returns when the last
is graded. Sessions of several turns go on in rounds: the next responses are asked for, again in a fixed order, when no
session waits for its environment any more. Each request's seed is a function of the run's seed, the group, the sample
and the turn, so the same run asks for the same samples whatever was interrupted in between, however long tools take.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.envs.grading import Grade, Outcome
from rlx.rollout.engine import Completion, Engine, EngineError, Request, check_completion, raise_if_cancelled
from rlx.rollout.rounds import Rounds
from rlx.rollout.session import Environment, EnvironmentFailed, Guarded
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Group, Sample, StopReason, Task

MakeEnvironment = Callable[[Task], Environment]  # a fresh one for each session


@dataclasses.dataclass(frozen=True)
class Sampling:
    group_size: int
    max_new_tokens: int
    temperature: float
    zero_reward_truncated: bool
    seed: int
    session_token_limit: int = 0  # tokens from which a session is given no further turn, 0 = none
    environment_timeout_s: float = 600.0  # of one call
    sessions_at_once: int = 0  # what sessions hold between rounds there is so often; 0 = no limit
    gradings: int = 0  # at once, of those that go on together; 0 = no limit
    retries: int = 3  # of an environment that does not begin
    backoff_s: float = 1.0  # doubles with each retry


def sample_seeds(seed: int, group: int, count: int) -> tuple[int, ...]:
    """uint32 seeds of a group's samples, a hash of (seed, group, index)."""
    return tuple(int(s) for s in np.random.SeedSequence([seed, group]).generate_state(count, np.uint32))


def turn_seed(seed: int, group: int, index: int, turn: int, written: int) -> int:
    """The uint32 seed of a later request of a sample: of turn `turn`, of which `written` tokens are there."""
    place = (index, turn, written)
    return int(np.random.SeedSequence([seed, group], spawn_key=place).generate_state(1)[0])


async def collect(
    engine: Engine, environments: MakeEnvironment, tasks: Sequence[tuple[int, Task]], sampling: Sampling
) -> list[Group]:
    """One group for each (group number, task). A sample whose environment failed has Outcome.ERROR, and no token where
    it did not even begin.

    Raises EngineError: the engine cannot serve.
    """
    size = max(1, sampling.sessions_at_once // sampling.group_size) if sampling.sessions_at_once else len(tasks)
    groups: list[Group] = []
    for some in itertools.batched(tasks, max(1, size)):
        groups += await _collect(engine, environments, some, sampling)
    return groups


def check_begun(groups: Sequence[Group]) -> None:
    """Raises EnvironmentFailed where not one session has a token: whatever they act in is not there at all."""
    samples = [sample for group in groups for sample in group.samples]
    if samples and not any(sample.num_written for sample in samples):
        raise EnvironmentFailed(
            "environment_error", f"no session of {len(samples)} began: {samples[0].grade['detail']}"
        )


async def _collect(
    engine: Engine, environments: MakeEnvironment, tasks: Sequence[tuple[int, Task]], sampling: Sampling
) -> list[Group]:
    """Groups whose sessions go on together."""
    count = len(tasks) * sampling.group_size
    rounds, graders = Rounds(count), asyncio.Semaphore(sampling.gradings or count)
    try:
        async with asyncio.TaskGroup() as running:
            jobs = [
                running.create_task(_Collected(engine, environments, task, number, sampling, rounds, graders).group())
                for number, task in tasks
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [job.result() for job in jobs]


class _Collected:
    """One group on its way."""

    def __init__(
        self,
        engine: Engine,
        environments: MakeEnvironment,
        task: Task,
        number: int,
        sampling: Sampling,
        rounds: Rounds,
        graders: asyncio.Semaphore,
    ):
        self.engine, self.task, self.number, self.sampling, self.rounds = engine, task, number, sampling, rounds
        self.graders = graders
        self._make = lambda: Guarded(environments(task), sampling.environment_timeout_s)
        self.environments = [self._make() for _ in range(sampling.group_size)]
        self.released: set[int] = set()

    async def group(self) -> Group:
        try:
            begun = await asyncio.gather(*(self._begin(i) for i in range(len(self.environments))))
            transcripts = {i: t for i, t in enumerate(begun) if isinstance(t, Transcript)}
            for _ in range(len(begun) - len(transcripts)):
                self.rounds.leave()
            if transcripts:
                await self._first(transcripts)
            jobs = (self._sample(i, t) if isinstance(t, Transcript) else self._none(i, t) for i, t in enumerate(begun))
            return Group(self.task, tuple(await asyncio.gather(*jobs)))
        finally:
            await asyncio.gather(*(self._release(i) for i in range(len(self.environments))))

    async def _begin(self, index: int) -> Transcript | EnvironmentFailed:
        """A session that has begun, or why it does not."""
        transcript, attempt = Transcript(), 0
        while True:
            try:
                transcript.observe(await self.environments[index].reset())
                return transcript
            except EnvironmentFailed as error:
                if attempt == self.sampling.retries:
                    return error
            await self._close(index)
            self.environments[index] = self._make()
            await asyncio.sleep(self.sampling.backoff_s * 2**attempt)
            attempt += 1

    async def _release(self, index: int) -> None:
        """Once: as soon as its sample is graded, since others may wait for what it holds."""
        if index not in self.released:
            self.released.add(index)
            await self._close(index)

    async def _close(self, index: int) -> None:
        with contextlib.suppress(EnvironmentFailed):  # what it does while it closes is not the sample's business
            await self.environments[index].close()

    async def _first(self, transcripts: Mapping[int, Transcript]) -> None:
        """The first responses; where all samples have one prompt, by one request, which computes it once."""
        every = sample_seeds(self.sampling.seed, self.number, self.sampling.group_size)
        seeds = tuple(every[i] for i in transcripts)
        prompts = [transcript.tokens() for transcript in transcripts.values()]
        name = f"{self.number}:{self.task.id}"
        await self.rounds.turn((self.number, 0), places=len(transcripts))
        if all(np.array_equal(prompt, prompts[0]) for prompt in prompts):
            answers = await self._ask(name, prompts[0], seeds)
        else:
            asked = (
                self._ask(f"{name}:{i}", p, (seed,)) for i, p, seed in zip(transcripts, prompts, seeds, strict=True)
            )
            answers = [answer for (answer,) in await asyncio.gather(*asked)]
        for transcript, answer in zip(transcripts.values(), answers, strict=True):
            transcript.write(answer)

    async def _none(self, index: int, error: EnvironmentFailed) -> Sample:
        """Of a session that did not begin."""
        await self._release(index)
        verdict = _no_verdict(error)
        return Transcript().sample(self.task, self.number, index, verdict, StopReason.ABORT, zero_truncated=False)

    async def _sample(self, index: int, transcript: Transcript) -> Sample:
        try:
            stop = await self._play(index, transcript)
        except EnvironmentFailed as error:
            verdict, stop = _no_verdict(error), transcript.stop_reason
        else:
            verdict = await self._grade(index, transcript)
        await self._release(index)
        return transcript.sample(
            self.task,
            self.number,
            index,
            verdict,
            verdict.stop_reason or stop,
            zero_truncated=self.sampling.zero_reward_truncated,
        )

    async def _play(self, index: int, transcript: Transcript) -> StopReason:
        """From the first response to the last. Leaves the rounds."""
        environment, limit = self.environments[index], self.sampling.session_token_limit or math.inf
        try:
            while (observation := await environment.step(transcript.turns[-1].response())) is not None:
                transcript.observe(observation)
                if transcript.length >= limit:
                    return StopReason.SESSION_LIMIT
                turn = len(transcript.turns) - 1
                await self.rounds.turn((self.number, index))
                seed = turn_seed(self.sampling.seed, self.number, index, turn, 0)
                name = f"{self.number}:{self.task.id}:{index}:{turn}:0"
                (answer,) = await self._ask(name, transcript.tokens(), (seed,))
                transcript.write(answer)
            return transcript.stop_reason
        finally:
            self.rounds.leave()

    async def _grade(self, index: int, transcript: Transcript) -> Verdict:
        """Waiting for a grader counts for no limit of the environment's."""
        async with self.graders:
            try:
                return await self.environments[index].grade(transcript)
            except EnvironmentFailed as error:
                return _no_verdict(error)

    async def _ask(self, name: str, prompt: np.ndarray, seeds: tuple[int, ...]) -> list[Completion]:
        sampling = self.sampling
        request = Request(name, prompt, seeds, sampling.max_new_tokens, sampling.temperature)
        try:
            answers = await self.engine.generate(request)
        except EngineError as error:
            raise_if_cancelled(error)  # a resumed run asks for the same samples again
            raise
        if len(answers) != len(seeds):
            raise EngineError(f"request {name}: {len(answers)} samples came, {len(seeds)} were asked for")
        for answer in answers:
            check_completion(request, answer)
        return answers


def _no_verdict(error: EnvironmentFailed) -> Verdict:
    return Verdict(Grade(0.0, "", f"{error.reason}: {error}", 0.0, Outcome.ERROR), "")
