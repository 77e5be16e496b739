"""What a run took, and what it took it for: the records from which `rlx simulate --fit` learns distributions.

Engines and environments are wrapped; they and everything that uses them stay as they are. A record is a flat dict with
a "kind", times in seconds of one clock, lengths in tokens:

    response  engine id sent done prompt_tokens samples tokens
              a request to an engine, until its answer or failure
    load      engine sent done version
              an engine takes over weights
    session   task prompt_tokens responses observations open_seconds tool_seconds close_seconds grade_seconds reward
              outcome
              written when it has been graded; lists have an entry a response, or for what lies between each two;
              open: until the prompt is there, close: after the last response
    update    began taken trained published ended tokens
              of the trainer's loop, which writes it: it turned to the buffer, had a batch, had trained on it, had
              published, was done; tokens of the batch, prompts included
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.rollout.engine import Completion, Replica, Request
from rlx.rollout.session import Environment
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Task

Trace = Callable[[Mapping[str, Any]], object]


def now() -> float:
    """Seconds of the running loop's clock, which may be a virtual one."""
    return asyncio.get_running_loop().time()


class TimedReplica:
    """A `Replica` that writes down every answer and every load."""

    def __init__(self, replica: Replica, trace: Trace):
        self._replica, self._trace = replica, trace

    @property
    def name(self) -> str:
        return self._replica.name

    @property
    def admission(self) -> int:
        return self._replica.admission

    @property
    def version(self) -> int:
        return self._replica.version

    async def generate(self, request: Request) -> list[Completion]:
        sent, written = now(), 0
        try:
            answers = await self._replica.generate(request)
            written = sum(len(answer.tokens) for answer in answers)
            return answers
        finally:
            self._trace(
                {
                    "kind": "response",
                    "engine": self.name,
                    "id": request.id,
                    "sent": sent,
                    "done": now(),
                    "prompt_tokens": len(request.prompt),
                    "samples": len(request.seeds),
                    "tokens": written,
                }
            )

    async def load(self, weights: Any, version: int, /) -> None:
        sent = now()
        await self._replica.load(weights, version)
        self._trace({"kind": "load", "engine": self.name, "sent": sent, "done": now(), "version": version})


class TimedEnvironment:
    """An `Environment` that writes down a session when it has been graded."""

    def __init__(self, environment: Environment, task: Task, trace: Trace):
        self._environment, self._task, self._trace = environment, task, trace
        self._open_seconds, self._close_seconds = 0.0, 0.0
        self._tool_seconds: list[float] = []

    async def reset(self) -> np.ndarray:
        begun = now()
        observation = await self._environment.reset()
        self._open_seconds = now() - begun
        return observation

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        begun = now()
        observation = await self._environment.step(response)
        if observation is None:
            self._close_seconds = now() - begun
        else:
            self._tool_seconds.append(now() - begun)
        return observation

    async def grade(self, transcript: Transcript) -> Verdict:
        verdict = await self._environment.grade(transcript)
        first, *later = transcript.turns
        self._trace(
            {
                "kind": "session",
                "task": self._task.id,
                "prompt_tokens": len(first.observation),
                "responses": [turn.num_written for turn in transcript.turns if turn.parts],
                "observations": [len(turn.observation) for turn in later],
                "open_seconds": self._open_seconds,
                "tool_seconds": self._tool_seconds,
                "close_seconds": self._close_seconds,
                "grade_seconds": verdict.grade.seconds,
                "reward": verdict.grade.reward,
                "outcome": str(verdict.grade.outcome),
            }
        )
        return verdict

    async def close(self) -> None:
        await self._environment.close()


def timed_environments(make: Callable[[Task], Environment], trace: Trace) -> Callable[[Task], Environment]:
    """`make`, whose environments write down their sessions."""
    return lambda task: TimedEnvironment(make(task), task, trace)
