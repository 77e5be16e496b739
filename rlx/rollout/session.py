"""A session: one attempt at a task, in one turn or many, token ids in and out."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rlx.envs.grading import Grade
from rlx.rollout.limits import bounded
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task


class Environment(Protocol):
    """What the policy acts in. Made for one session, used once; what it raises ends that session."""

    async def reset(self) -> np.ndarray:
        """The first observation, int32 [P]: the prompt."""
        ...

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        """What follows a whole response, int32 [W]: the next observation, int32 [M], or None where the session is over.

        A response that max_new_tokens cut comes here as well.
        """
        ...

    async def grade(self, transcript: Transcript) -> Verdict:
        """Judges the session, once: when it is over, or when a limit stopped it."""
        ...

    async def close(self) -> None:
        """Releases what it holds; called once, whatever happened before."""
        ...


class Graders(Protocol):
    """`rlx.envs.graders.GraderPool`, or what stands for it."""

    def grade(self, task: Task, text: str) -> Future[Grade] | asyncio.Future[Grade]: ...


class Tokenizer(Protocol):
    """What is needed of `rlx.envs.chat.ChatTokenizer`."""

    def encode_prompt(self, question: str) -> np.ndarray: ...

    def decode(self, ids: np.ndarray) -> str: ...


class TaskEnvironment:
    """One question, one response, one grade."""

    def __init__(
        self, task: Task, graders: Graders, tokenizer: Tokenizer, asked: Callable[[str], np.ndarray] | None = None
    ):
        """asked: the prompt of a question; None = as the tokenizer makes it."""
        self._task, self._graders, self._tokenizer = task, graders, tokenizer
        self._asked = asked or tokenizer.encode_prompt

    async def reset(self) -> np.ndarray:
        return self._asked(self._task.question)

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        return None

    async def grade(self, transcript: Transcript) -> Verdict:
        text = self._tokenizer.decode(transcript.turns[-1].response())
        return Verdict(await asyncio.wrap_future(self._graders.grade(self._task, text)), text)

    async def close(self) -> None:
        return None


def questions(graders: Graders, tokenizer: Tokenizer) -> Callable[[Task], Environment]:
    """Environments of sessions of one turn. A prompt, read-only, is made once for the samples of a group."""

    @functools.lru_cache(maxsize=64)  # tasks in flight at once, about
    def asked(question: str) -> np.ndarray:
        prompt = tokenizer.encode_prompt(question)
        prompt.setflags(write=False)
        return prompt

    return lambda task: TaskEnvironment(task, graders, tokenizer, asked)


class EnvironmentFailed(RuntimeError):
    """An environment or its grader raised, hung or said what makes no sense; `reason` is a short name for it."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Guarded:
    """An `Environment` whose every call ends within `limit_s`, in a sensible answer or as EnvironmentFailed."""

    def __init__(self, environment: Environment, limit_s: float):
        self._environment, self._limit_s = environment, limit_s

    async def reset(self) -> np.ndarray:
        return _token_ids(await self._call("environment", self._environment.reset()), "reset")

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        observation = await self._call("environment", self._environment.step(response))
        return None if observation is None else _token_ids(observation, "step")

    async def grade(self, transcript: Transcript) -> Verdict:
        verdict = await self._call("grader", self._environment.grade(transcript))
        sensible = isinstance(verdict, Verdict) and isinstance(verdict.grade, Grade)
        if not sensible or not math.isfinite(verdict.grade.reward):
            raise EnvironmentFailed(
                "grader_nonsense", f"a grade must be a Verdict with a finite reward, got {verdict!r}"
            )
        return verdict

    async def close(self) -> None:
        await self._call("environment", self._environment.close())

    async def _call[T](self, what: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await bounded(work, self._limit_s)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{what}_timeout", f"{what}: {error} (producer.environment_timeout_s)") from error
        except Exception as error:
            raise EnvironmentFailed(f"{what}_error", f"{what}: {type(error).__name__}: {error}") from error


def _token_ids(said: Any, call: str) -> np.ndarray:
    if not isinstance(said, np.ndarray) or said.ndim != 1 or (len(said) and not np.issubdtype(said.dtype, np.integer)):
        raise EnvironmentFailed("environment_nonsense", f"{call} must return 1-D token ids, got {said!r}")
    return said


async def play(
    environment: Environment, transcript: Transcript, respond: Callable[[Transcript], Awaitable[None]], limit: int
) -> StopReason:
    """Take a session to its end and say why it ended. A transcript that has begun goes on from where it is.

    Args:
      respond: lets the policy write the rest of its response into the transcript.
      limit: tokens from which no further turn is begun, 0 = none; the last turn may go beyond.
    Raises:
      EnvironmentFailed: also where the environment does not do again what it did before. What `respond` raises.
    """
    if transcript.turns:
        await _replay(environment, transcript)
    else:
        transcript.observe(await environment.reset())
    while True:
        if not transcript.answered:
            if limit and transcript.length >= limit and not transcript.turns[-1].parts:
                return StopReason.SESSION_LIMIT
            await respond(transcript)
        observation = await environment.step(transcript.turns[-1].response())
        if observation is None:
            return transcript.stop_reason
        transcript.observe(observation)


async def _replay(environment: Environment, transcript: Transcript) -> None:
    """Bring a fresh environment to where the transcript is."""
    observation: np.ndarray | None = await environment.reset()
    for turn, after in zip(transcript.turns, [*transcript.turns[1:], None]):
        if observation is None or not np.array_equal(observation, turn.observation):
            raise EnvironmentFailed(
                "environment_replay", "the environment's words are not those that it had for this session before"
            )
        if after is not None:
            observation = await environment.step(turn.response())
