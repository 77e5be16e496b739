"""Sessions that take the time of real ones and say nothing, for `rlx simulate`.

The tokens carry what a real prompt would show. Every token of an observation is the observation's length, but for the
first of a prompt, which names the task; every token of a response is the response's own number. So an engine sees how
much of a prompt its prefix cache holds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random

import numpy as np

from rlx.config.simulation import SimulatedFaults, SimulatedSessions
from rlx.envs.grading import Grade, Outcome
from rlx.rollout.draws import Draw
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Task

TASK_TAG = 1 << 28  # + the task's number
RESPONSE_TAG = 1 << 29  # + the response's number
LAST_TAG = (1 << 31) - 1


class Work:
    """What all engines and sessions of a simulation draw from. Lengths are in tokens of the simulation.

    Args:
      token_grain: tokens of the configuration that one token of the simulation stands for.
    """

    def __init__(self, config: SimulatedSessions, faults: SimulatedFaults, seed: int, token_grain: int = 1):
        self.seed, self.faults = seed, faults
        self.unfinished: dict[int, int] = {}  # tokens that a failed engine left to write, by the response's tag
        self._tags = itertools.cycle(range(RESPONSE_TAG, LAST_TAG))
        per_token = 1.0 / token_grain
        self.prompt_tokens = Draw(config.prompt_tokens, per_token)
        self.response_tokens = Draw(config.response_tokens, per_token)
        self.tool_tokens = Draw(config.tool_tokens, per_token)
        self.turns = Draw(config.turns)
        self.open_seconds, self.close_seconds = Draw(config.open_seconds), Draw(config.close_seconds)
        self.tool_seconds, self.grade_seconds = Draw(config.tool_seconds), Draw(config.grade_seconds)
        self.pass_rates, self.factors = task_properties(config, seed)
        self._opened = [0] * config.tasks  # sessions so far, by task

    def next_tag(self) -> int:
        return next(self._tags)

    def response_length(self, task_tag: int, seed: int) -> int:
        return max(1, round(self.response_tokens.of_seed(seed) * self.factors[task_tag - TASK_TAG]))

    def environment(self, task: Task) -> ModelledEnvironment:
        """A session of its own; the n-th one of a task is always the same."""
        number = int(task.metadata["number"])
        self._opened[number] += 1
        return ModelledEnvironment(self, number, self._opened[number])


def task_properties(config: SimulatedSessions, seed: int) -> tuple[list[float], list[float]]:
    """Pass rates, and factors on response lengths, of all tasks: evenly spaced in probability, each in an order of its
    own, so that few tasks have the distribution's mean too."""
    rng = np.random.default_rng([seed, 1])
    probability = (np.arange(config.tasks) + 0.5) / config.tasks
    rates = Draw(config.pass_rate)
    factors = Draw(dataclasses.replace(config.response_tokens, kind="lognormal", mean=1.0, cv=config.task_cv))
    columns = [[draw.at(p) for p in rng.permutation(probability)] for draw in (rates, factors)]
    return columns[0], columns[1]


class ModelledEnvironment:
    """An `Environment`: its own generator says how long it goes on, what it says, and whether the attempt passed."""

    def __init__(self, work: Work, task: int, number: int):
        self._work, self._task = work, task
        self._draw = random.Random((work.seed << 64) + (task << 32) + number).random
        self._left = max(1, round(work.turns.at(self._draw())))

    async def reset(self) -> np.ndarray:
        await self._spend(self._work.open_seconds)
        length = max(2, round(self._work.prompt_tokens.at(self._draw())))
        prompt = np.full(length, length, np.int32)
        prompt[0] = TASK_TAG + self._task
        return prompt

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        self._left -= 1
        if self._left <= 0:
            await self._spend(self._work.close_seconds)
            return None
        await self._spend(self._work.tool_seconds)
        length = max(1, round(self._work.tool_tokens.at(self._draw())))
        return np.full(length, length, np.int32)

    async def grade(self, transcript: Transcript) -> Verdict:
        seconds = await self._spend(self._work.grade_seconds)
        if self._draw() < self._work.faults.failed_gradings:
            return Verdict(Grade(0.0, "", "modelled failure", seconds, Outcome.ERROR), "")
        reward = float(self._draw() < self._work.pass_rates[self._task])
        return Verdict(Grade(reward, "", "", seconds, Outcome.GRADED), "")

    async def close(self) -> None:
        return None

    async def _spend(self, draw: Draw) -> float:
        seconds = draw.at(self._draw())
        if seconds > 0:
            await asyncio.sleep(seconds)
        return seconds
