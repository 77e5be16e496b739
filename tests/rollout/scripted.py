"""An engine, graders and environments of a script: what they say follows from a request's seed, when from the clock.

A token's log-prob tells the version that wrote it, so that tests can compare it with the version that was recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.envs.grading import Grade, Outcome
from rlx.rollout.engine import Completion, EngineError, Request
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task, TopK, VersionSpan

VOCAB = 1000
FAULTS = (
    "dies", "dies_with_partial", "raises", "hangs", "hangs_deaf", "short", "positive", "shifted_head", "nonfinite",
    "duplicate_ids", "two_answers", "wrong_version", "old_version", "empty", "none", "aborts",
)  # fmt: skip


def token_logprob(version: int) -> np.float32:
    return np.float32(-1.0 - version / 1000)


def written_by(logprobs: np.ndarray) -> np.ndarray:
    """The versions that wrote tokens of these log-probs."""
    return np.rint((-1.0 - logprobs) * 1000).astype(int)


@dataclasses.dataclass(eq=False)
class Running:
    request: Request
    seed: int
    length: int
    started: float
    versions: list[int] = dataclasses.field(default_factory=list)  # of the tokens written before the last load


class ScriptedEngine:
    """faults: by the number of the request, 0 for the first it gets, what goes wrong with it.

    recalls: a cancelled request says what it had written.
    """

    def __init__(
        self,
        name: str = "a",
        *,
        admission: int = 4,
        version: int = 0,
        token_s: float = 0.01,
        load_s: float = 0.05,
        lengths: tuple[int, int] = (1, 12),
        head_size: int = 0,
        faults: Mapping[int, str] | Callable[[int], str | None] | None = None,
        bad_loads: Callable[[int], str | None] = lambda load: None,
        recalls: bool = False,
    ):
        self.name, self.admission, self.version = name, admission, version
        self.token_s, self.load_s, self.lengths, self.head_size = token_s, load_s, lengths, head_size
        self._fault = faults if callable(faults) else (faults or {}).get
        self._bad_load, self._recalls = bad_loads, recalls
        self.requests: list[Request] = []
        self.loads: list[int] = []
        self.running: dict[Running, None] = {}
        self.most_running = 0
        self._slots = asyncio.Semaphore(admission)
        self._dead = asyncio.Event()

    async def generate(self, request: Request) -> list[Completion]:
        number = len(self.requests)
        self.requests.append(request)
        fault = self._fault(number)
        async with self._slots:
            if self._dead.is_set():
                raise EngineError(f"{self.name} is dead", reason="dead")
            jobs = [self._begin(request, seed) for seed in request.seeds]
            try:
                return await self._answer(request, jobs, fault)
            except asyncio.CancelledError as cancelled:
                if not self._recalls:
                    raise
                raise EngineError("cancelled", reason="cancelled", partial=self._parts(jobs)) from cancelled
            finally:
                for job in jobs:
                    self.running.pop(job, None)

    async def load(self, weights: Any, version: int, /) -> None:
        count = len(self.loads)
        self.loads.append(version)
        bad = self._bad_load(count)
        if bad == "hangs":
            await asyncio.Event().wait()
        await asyncio.sleep(self.load_s)
        if bad == "raises":
            raise EngineError(f"{self.name} cannot load")
        for job in self.running:
            job.versions += [self.version] * (self._written(job) - len(job.versions))
        if bad != "keeps_version":
            self.version = version
        self._dead.clear()

    # ---------------------------------------------------------------------------------------------------------- writing

    def _begin(self, request: Request, seed: int) -> Running:
        low, high = self.lengths
        length = low + seed % (high - low + 1)
        job = Running(request, seed, min(length, request.max_new_tokens), asyncio.get_running_loop().time())
        self.running[job] = None
        self.most_running = max(self.most_running, len(self.running))
        return job

    def _written(self, job: Running) -> int:
        passed = (asyncio.get_running_loop().time() - job.started) / self.token_s
        return min(job.length, int(passed + 1e-6))

    async def _answer(self, request: Request, jobs: list[Running], fault: str | None) -> list[Completion]:
        longest = max(job.length for job in jobs)
        if fault in ("dies", "dies_with_partial"):
            await asyncio.sleep(self.token_s * longest / 2)
            self._dead.set()
            saved = self._parts(jobs) if fault == "dies_with_partial" else ()
            raise EngineError(f"{self.name} died", reason="dead", partial=saved)
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "hangs_deaf":
            await self._deaf(3600.0)
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((dying,), timeout=self.token_s * longest)
        finally:
            dying.cancel()
        if self._dead.is_set():
            raise EngineError(f"{self.name} died", reason="dead", partial=self._parts(jobs))
        answers = [self._completion(job, job.length) for job in jobs]
        return answers if fault in (None, "hangs_deaf") else self._spoil(fault, answers)

    def _parts(self, jobs: list[Running]) -> tuple[Completion | None, ...]:
        parts = (self._completion(job, self._written(job)) for job in jobs)
        return tuple(part if len(part.tokens) else None for part in parts)

    async def _deaf(self, seconds: float) -> None:
        """Sleep through every attempt to be cancelled."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue

    def _completion(self, job: Running, written: int) -> Completion:
        versions = np.array([*job.versions, *[self.version] * written][:written], int)
        at = np.arange(written) + len(job.request.prompt)
        tokens = ((job.seed + 7 * at) % VOCAB).astype(np.int32)
        logprobs = np.array([token_logprob(v) for v in versions], np.float32)
        changes = [0, *(np.flatnonzero(np.diff(versions)) + 1), written] if written else [0, 0]
        spans = tuple(VersionSpan(int(versions[a]), int(a), int(b)) for a, b in itertools.pairwise(changes) if b > a)
        whole = written < job.request.max_new_tokens
        stop = StopReason.ABORT if written < job.length else StopReason.STOP if whole else StopReason.LENGTH
        return Completion(tokens, logprobs, self._head(tokens, logprobs), spans, stop)

    def _head(self, tokens: np.ndarray, logprobs: np.ndarray) -> TopK | None:
        if not self.head_size:
            return None
        ids = (tokens[:, None] + np.arange(self.head_size)) % VOCAB
        tail = np.broadcast_to(np.float32(-np.log(4 * self.head_size)), (len(tokens), self.head_size - 1))
        return TopK(ids.astype(np.int32), np.concatenate([logprobs[:, None], tail], axis=1))

    def _spoil(self, fault: str, answers: list[Completion]) -> list[Completion]:
        first = answers[0]
        head = first.head or TopK(np.stack([first.tokens, first.tokens + 1], 1), np.full((len(first.tokens), 2), -1.0))
        spoilt: dict[str, Any] = {
            "short": {"logprobs": first.logprobs[:-1]},
            "positive": {"logprobs": -first.logprobs},
            "shifted_head": {"head": TopK(head.ids, head.logprobs - 0.5)},
            "nonfinite": {"logprobs": np.where(np.arange(len(first.tokens)) == 0, np.nan, first.logprobs)},
            "duplicate_ids": {"head": TopK(np.zeros_like(head.ids), head.logprobs)},
            "wrong_version": {"version_spans": (VersionSpan(self.version + 100, 0, len(first.tokens)),)},
            "old_version": {"version_spans": (VersionSpan(self.version - 100, 0, len(first.tokens)),)},
            "aborts": {"stop_reason": StopReason.ABORT},
        }
        match fault:
            case "raises":
                raise ValueError(f"{self.name}: a defect")
            case "two_answers":
                return [*answers, first]
            case "empty":
                return []
            case "none":
                return None  # type: ignore[return-value]
        return [dataclasses.replace(first, **spoilt[fault]), *answers[1:]]


# ------------------------------------------------------------------------------------------------------------ the rest


class Tokenizer:
    """A question of n characters is a prompt of n tokens; a response is written as its numbers."""

    def encode_prompt(self, question: str) -> np.ndarray:
        return np.array([ord(c) % VOCAB for c in question], np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


class Graders:
    """Reward 1 where the last token is odd in its tens. `faults` by the number of the grading."""

    def __init__(self, seconds: float = 0.02, faults: Callable[[int], str | None] = lambda number: None):
        self.seconds, self._fault = seconds, faults
        self.graded = 0
        self.most_running = self._running = 0

    def grade(self, task: Task, text: str) -> asyncio.Future[Grade]:
        fault = self._fault(self.graded)
        self.graded += 1
        return asyncio.ensure_future(self._grade(text, fault))

    async def _grade(self, text: str, fault: str | None) -> Grade:
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            await (asyncio.Event().wait() if fault == "hangs" else asyncio.sleep(self.seconds))
        finally:
            self._running -= 1
        if fault == "raises":
            raise ValueError("a grader's defect")
        if fault in ("timeout", "error"):
            return Grade(0.0, "", fault, self.seconds, Outcome(fault))
        reward = float(int(text.split()[-1]) // 10 % 2)
        return Grade(float("nan") if fault == "nan" else reward, text, "", self.seconds, Outcome.GRADED)


class Conversation:
    """An environment of several turns: it says three tokens after each response, `turns` times in all."""

    def __init__(
        self,
        task: Task,
        *,
        turns: int = 3,
        seconds: float = 0.03,
        faults: Callable[[str], str | None] = lambda call: None,
        words: int = 3,
    ):
        self.task, self.turns, self.seconds, self.words = task, turns, seconds, words
        self.responses: list[np.ndarray] = []
        self._fault = faults

    async def reset(self) -> np.ndarray:
        await self._work("reset")
        return np.array([ord(c) % VOCAB for c in self.task.question], np.int32)

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        await self._work("step")
        self.responses.append(response)
        if len(self.responses) == self.turns:
            return None
        return np.full(self.words, len(self.responses), np.int32)

    async def grade(self, transcript: Transcript) -> Verdict:
        await self._work("grade")
        reward = float(transcript.turns[-1].response().sum() % 2) if transcript.turns[-1].parts else 0.0
        return Verdict(Grade(reward, "", "", self.seconds, Outcome.GRADED), f"{len(transcript.turns)} turns")

    async def close(self) -> None:
        await self._work("close")

    async def _work(self, call: str) -> None:
        fault = self._fault(call)
        if fault == "hangs":
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds)
        if fault == "raises":
            raise OSError(f"the sandbox broke in {call}")


def tasks(length: int = 5) -> Callable[[], tuple[int, Task]]:
    """An endless stream."""
    number = -1

    def next_task() -> tuple[int, Task]:
        nonlocal number
        number += 1
        return number, Task(f"sums/{number}", "sums", question="x" * length, answer="2", grader="number")

    return next_task
