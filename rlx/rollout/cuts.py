"""Cut points: where step k of a task of several steps begins, in a recorded pass. Sessions can start there.

A cut holds what was said before the step, as ids, and the workspace as it was. A session from it is told all of that as
its first observation, so that the policy continues it and is trained on nothing of it. Files are named by the SHA-256
of their content and written at once or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlx.envs.cut_index import INDEX, Place, read_index, write_index
from rlx.envs.env import Env
from rlx.rollout.records import RecordError, pack, read_task, task_tree, unpack
from rlx.rollout.session import Environment
from rlx.rollout.transcript import Transcript, Verdict, join
from rlx.types import Task

SUFFIX = ".cut"
PASSED = 1.0  # the reward of a session whose cuts are kept


class CutRefused(ValueError):
    """A cut that cannot be used; the message names it and says why."""


class StepwiseEnv(Env, Protocol):
    """An `Env` whose task has steps, in a workspace that can be taken down and put back."""

    @property
    def step_number(self) -> int:
        """The step that is worked on, from 0."""
        ...

    async def snapshot(self) -> bytes:
        """The workspace: equal bytes for equal files."""
        ...

    async def resume(self, step: int, snapshot: bytes) -> None:
        """In place of `reset`: the workspace as it was when step `step` began."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Where step `step` of a task begins."""

    task: Task  # that was passed
    step: int  # from 0
    observations: tuple[np.ndarray, ...]  # int32, one more than responses: the last one tells the step
    responses: tuple[np.ndarray, ...]  # int32
    snapshot: bytes
    tokenizer: str  # the fingerprint of what made the ids

    @property
    def tokens(self) -> np.ndarray:
        """int32 [N], all that was said before the step."""
        turns = zip(self.observations, (*self.responses, np.zeros(0, np.int32)))
        return join([ids for turn in turns for ids in turn], np.int32)

    @property
    def workspace(self) -> str:
        return hashlib.sha256(self.snapshot).hexdigest()

    @property
    def name(self) -> str:
        return f"{self.task.id}, step {self.step + 1}"


class CutStore:
    """The cuts of a directory, by digest."""

    def __init__(self, directory: Path):
        self.directory = directory

    def put(self, cut: Cut) -> str:
        """The cut's digest. A cut that is there already stays as it is."""
        data = pack(_tree(cut))
        digest = hashlib.sha256(data).hexdigest()
        self.directory.mkdir(parents=True, exist_ok=True)
        if not (self.directory / f"{digest}{SUFFIX}").exists():
            self._write(f"{digest}{SUFFIX}", data)
        index = read_index(self.directory) if (self.directory / INDEX).is_file() else {}
        index[digest] = Place(cut.task.id, cut.step)
        self._write(INDEX, write_index(index))
        return digest

    def _write(self, name: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.directory / name)

    def get(self, digest: str) -> Cut:
        """Raises CutRefused for one that is not there or is damaged."""
        path = self.directory / f"{digest}{SUFFIX}"
        if not path.is_file():
            raise CutRefused(f"there is no cut {digest} in {self.directory}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise CutRefused(f"cut {path} is damaged: its content has another digest; delete it and record it again")
        try:
            return _read(unpack(data))
        except (RecordError, KeyError, TypeError) as error:
            raise CutRefused(f"cut {path} is of another version: {error}") from error

    def __iter__(self) -> Iterator[tuple[str, Cut]]:
        """All of them, by task and step. Raises CutRefused where one cannot be read."""
        found, problems = self.readable()
        if problems:
            raise CutRefused("\n".join(problems))
        yield from found

    def readable(self) -> tuple[list[tuple[str, Cut]], list[str]]:
        """Those that can be read, by task and step, and what is wrong with the others."""
        found: list[tuple[str, Cut]] = []
        problems: list[str] = []
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            try:
                found.append((path.stem, self.get(path.stem)))
            except CutRefused as refused:
                problems.append(str(refused))
        return sorted(found, key=lambda pair: (pair[1].task.id, pair[1].step, pair[0])), problems


def _tree(cut: Cut) -> dict[str, Any]:
    return {
        "task": task_tree(cut.task),
        "step": cut.step,
        "observations": list(cut.observations),
        "responses": list(cut.responses),
        "snapshot": np.frombuffer(cut.snapshot, np.uint8),
        "tokenizer": cut.tokenizer,
    }


def _read(tree: dict[str, Any]) -> Cut:
    words = {name: tuple(tree[name]) for name in ("observations", "responses")}
    return Cut(
        read_task(tree["task"]), tree["step"], **words, snapshot=tree["snapshot"].tobytes(), tokenizer=tree["tokenizer"]
    )


# ------------------------------------------------------------------------------------------------------------- sessions


class RecordedSession:
    """A session that remembers where the steps of its task began: an `Environment` around another.

    tokenizer: the fingerprint of what makes the ids. `cuts` has one for each step that was reached, but the first.
    """

    def __init__(self, inner: Environment, env: StepwiseEnv, task: Task, tokenizer: str):
        self._inner, self._env, self._task, self._tokenizer = inner, env, task, tokenizer
        self._observations: list[np.ndarray] = []
        self._responses: list[np.ndarray] = []
        self.cuts: list[Cut] = []

    async def reset(self) -> np.ndarray:
        self._observations.append(await self._inner.reset())
        return self._observations[-1]

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        before = self._env.step_number
        observation = await self._inner.step(response)
        if observation is None:
            return None
        self._responses.append(response)
        self._observations.append(observation)
        if self._env.step_number > before:
            words = tuple(self._observations), tuple(self._responses)
            snapshot = await self._env.snapshot()
            self.cuts.append(Cut(self._task, self._env.step_number, *words, snapshot, self._tokenizer))
        return observation

    async def grade(self, transcript: Transcript) -> Verdict:
        return await self._inner.grade(transcript)

    async def close(self) -> None:
        await self._inner.close()


class CutSession:
    """A session that starts at a cut: an `Environment` around another of the same task."""

    def __init__(self, inner: Environment, env: StepwiseEnv, cut: Cut):
        self._inner, self._env, self._cut = inner, env, cut

    async def reset(self) -> np.ndarray:
        await self._env.resume(self._cut.step, self._cut.snapshot)
        return self._cut.tokens

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        return await self._inner.step(response)

    async def grade(self, transcript: Transcript) -> Verdict:
        return await self._inner.grade(transcript)

    async def close(self) -> None:
        await self._inner.close()


# ----------------------------------------------------------------------------------------------------------- recording


async def record(session: RecordedSession, responses: Sequence[np.ndarray]) -> list[Cut]:
    """The cuts of a pass whose responses are given, such as those that an engine wrote in a session that passed.

    Raises CutRefused where it does not pass.
    """
    try:
        transcript = Transcript()
        transcript.observe(await session.reset())
        for i, response in enumerate(responses):
            observation = await session.step(response)
            if observation is None and i < len(responses) - 1:
                raise CutRefused(f"the session was over after {i + 1} of {len(responses)} responses")
        verdict = await session.grade(transcript)
    finally:
        await session.close()
    if verdict.grade.reward < PASSED:
        raise CutRefused(f"it is no pass: reward {verdict.grade.reward:g} ({verdict.grade.detail})")
    return session.cuts


async def verify(cut: Cut, session: Environment, env: StepwiseEnv, tokenizer: str) -> None:
    """Play a cut's steps again, from the start of its task: the same must be said, and the same workspace be left.

    session: a fresh one of the cut's task, around `env`; it is closed.
    Raises CutRefused; it names the cut and the first difference.
    """
    if cut.tokenizer != tokenizer:
        raise CutRefused(f"cut {cut.name} was recorded with another tokenizer or chat template; record it again")
    try:
        observation: np.ndarray | None = await session.reset()
        for i, expected in enumerate(cut.observations):
            if observation is None or not np.array_equal(observation, expected):
                what = "the session was over" if observation is None else "another observation came"
                raise CutRefused(f"cut {cut.name}: {what} before response {i + 1} of {len(cut.responses)}")
            if i < len(cut.responses):
                observation = await session.step(cut.responses[i])
        found = hashlib.sha256(await env.snapshot()).hexdigest()
    finally:
        await session.close()
    if found != cut.workspace:
        raise CutRefused(f"cut {cut.name}: the workspace is another one ({found[:12]}, not {cut.workspace[:12]})")
