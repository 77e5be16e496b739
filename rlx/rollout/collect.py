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
from collections.abc import Callable, Sequence

import numpy as np

from rlx.envs.grading import Grade, Outcome
from rlx.rollout.engine import Completion, Engine, EngineError, Request, check_completion, raise_if_cancelled
from rlx.rollout.rounds import Rounds
from rlx.rollout.session import Environment, EnvironmentFailed, Guarded
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Group, Sample, StopReason, Task

Environments = Callable[[Task], Environment]  # a fresh one for each session


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


def sample_seeds(seed: int, group: int, count: int) -> tuple[int, ...]:
    """uint32 seeds of a group's samples, a hash of (seed, group, index)."""
    return tuple(int(s) for s in np.random.SeedSequence([seed, group]).generate_state(count, np.uint32))


def turn_seed(seed: int, group: int, index: int, turn: int, written: int) -> int:
    """The uint32 seed of a later request of a sample: of turn `turn`, of which `written` tokens are there."""
    place = (index, turn, written)
    return int(np.random.SeedSequence([seed, group], spawn_key=place).generate_state(1)[0])


async def collect(
    engine: Engine, environments: Environments, tasks: Sequence[tuple[int, Task]], sampling: Sampling
) -> list[Group]:
    """One group for each (group number, task). A sample whose environment failed has Outcome.ERROR.

    Raises:
      EngineError: the engine cannot serve. EnvironmentFailed: an environment does not begin.
    """
    size = max(1, sampling.sessions_at_once // sampling.group_size) if sampling.sessions_at_once else len(tasks)
    groups: list[Group] = []
    for some in itertools.batched(tasks, max(1, size)):
        groups += await _collect(engine, environments, some, sampling)
    return groups


async def _collect(
    engine: Engine, environments: Environments, tasks: Sequence[tuple[int, Task]], sampling: Sampling
) -> list[Group]:
    """Groups whose sessions go on together."""
    rounds = Rounds(len(tasks) * sampling.group_size)
    try:
        async with asyncio.TaskGroup() as running:
            jobs = [
                running.create_task(_Collected(engine, environments, task, number, sampling, rounds).group())
                for number, task in tasks
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [job.result() for job in jobs]


class _Collected:
    """One group on its way."""

    def __init__(
        self, engine: Engine, environments: Environments, task: Task, number: int, sampling: Sampling, rounds: Rounds
    ):
        self.engine, self.task, self.number, self.sampling, self.rounds = engine, task, number, sampling, rounds
        made = [environments(task) for _ in range(sampling.group_size)]
        self.environments = [Guarded(environment, sampling.environment_timeout_s) for environment in made]
        self.released: set[int] = set()

    async def group(self) -> Group:
        try:
            prompts = await asyncio.gather(*(e.reset() for e in self.environments))
            answers = await self._first(prompts)
            transcripts = [Transcript() for _ in prompts]
            for transcript, prompt, answer in zip(transcripts, prompts, answers, strict=True):
                transcript.observe(prompt)
                transcript.write(answer)
            samples = await asyncio.gather(*(self._sample(i, t) for i, t in enumerate(transcripts)))
            return Group(self.task, tuple(samples))
        finally:
            await asyncio.gather(*(self._release(i) for i in range(len(self.environments))))

    async def _release(self, index: int) -> None:
        """Once: as soon as its sample is graded, since others may wait for what it holds."""
        if index not in self.released:
            self.released.add(index)
            with contextlib.suppress(EnvironmentFailed):  # what it does while it closes is not the sample's business
                await self.environments[index].close()

    async def _first(self, prompts: Sequence[np.ndarray]) -> list[Completion]:
        """The first responses; where all samples have one prompt, by one request, which computes it once."""
        seeds = sample_seeds(self.sampling.seed, self.number, self.sampling.group_size)
        await self.rounds.turn((self.number, 0), places=self.sampling.group_size)
        if all(np.array_equal(prompt, prompts[0]) for prompt in prompts):
            return await self._ask(f"{self.number}:{self.task.id}", prompts[0], seeds)
        asked = (
            self._ask(f"{self.number}:{self.task.id}:{i}", prompt, (seed,))
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        return [answer for (answer,) in await asyncio.gather(*asked)]

    async def _sample(self, index: int, transcript: Transcript) -> Sample:
        try:
            stop = await self._play(index, transcript)
        except EnvironmentFailed as error:
            grade = Grade(0.0, "", f"{error.reason}: {error}", 0.0, Outcome.ERROR)
            verdict, stop = Verdict(grade, ""), transcript.stop_reason
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
        try:
            return await self.environments[index].grade(transcript)
        except EnvironmentFailed as error:
            return Verdict(Grade(0.0, "", f"{error.reason}: {error}", 0.0, Outcome.ERROR), "")

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
