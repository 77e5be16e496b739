"""The interface of an inference engine: token ids in, token ids with their statistics out. Nothing is detokenised."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from rlx.algos.head_records import head_problems
from rlx.types import StopReason, TopK, VersionSpan

LOGPROB_TOLERANCE = 1e-4  # nats above 0 that rounding may make of a log-prob


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """n = len(seeds) samples of one prompt; they share its prefill."""

    id: str
    prompt: np.ndarray  # int32 [P], P >= 1
    seeds: tuple[int, ...]  # uint32 each; the same seed, prompt and weights give the same sample
    max_new_tokens: int
    temperature: float  # 0 = greedy


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """One sampled response of W tokens; a stop token, where one was sampled, is the last of them."""

    tokens: np.ndarray  # int32 [W]
    logprobs: np.ndarray  # float32 [W], under the distribution that sampled
    head: TopK | None  # W rows
    version_spans: tuple[VersionSpan, ...]  # over the response's indices, covering [0, W)
    stop_reason: StopReason
    # int16 [W, layers of experts, k]: the experts that the token before each one was sent to, where they are recorded.
    routes: np.ndarray | None = None


class EngineError(RuntimeError):
    """An engine that failed, or answered what it must not have.

    reason: a short name to count it by. partial: what was written before it failed, for each seed or not at all;
    whoever asked can go on from there on another engine.
    """

    def __init__(self, message: str, *, reason: str = "engine", partial: tuple[Completion | None, ...] = ()):
        super().__init__(message)
        self.reason = reason
        self.partial = partial


class RequestRefused(EngineError):
    """A request that no engine can serve: the request is at fault, not the engine."""

    def __init__(self, message: str):
        super().__init__(message, reason="refused")


def raise_if_cancelled(error: EngineError) -> None:
    """Raise CancelledError where `error` came in its place: the task that handles it is being cancelled."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


class Engine(Protocol):
    """Whatever answers requests: an engine, or a fleet of them."""

    async def generate(self, request: Request) -> list[Completion]:
        """The request's samples in the order of its seeds.

        Cancelling it frees what it holds; it may then raise EngineError with `partial` in place of CancelledError.

        Raises:
          RequestRefused: it cannot be served, here or elsewhere.
          EngineError: the engine failed.
        """
        ...


class Replica(Engine, Protocol):
    """One engine of a fleet."""

    @property
    def name(self) -> str:
        """Unique in the fleet."""
        ...

    @property
    def admission(self) -> int:
        """Requests that it runs at once; more of them wait in it."""
        ...

    @property
    def version(self) -> int:
        """What it serves now."""
        ...

    async def load(self, weights: Any, version: int, /) -> None:
        """Serve `weights` as `version` from the next token on, and forget every cached prefix.

        Running requests go on: the tokens they have keep ids, log-probs and version, the rest is the new version's.
        """
        ...


def check_request(request: Request, vocab_size: int, context: int) -> None:
    """Raise RequestRefused for what no engine should be sent."""
    prompt = request.prompt
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer) or not len(prompt):
        raise RequestRefused(f"request {request.id}: the prompt must be a non-empty 1-D integer array, got {prompt!r}")
    if len(prompt) >= context:
        raise RequestRefused(
            f"request {request.id}: a prompt of {len(prompt)} tokens leaves no room in a context of {context}. "
            "Raise engine.context or shorten the prompt."
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise RequestRefused(f"request {request.id}: token ids must be in [0, {vocab_size}), got up to {prompt.max()}")
    if request.max_new_tokens < 1 or not request.seeds:
        raise RequestRefused(f"request {request.id}: at least one sample of at least one token must be asked for")
    if not all(0 <= seed < 2**32 for seed in request.seeds):
        raise RequestRefused(f"request {request.id}: seeds must be in [0, 2**32), got {request.seeds}")
    if not request.temperature >= 0:
        raise RequestRefused(f"request {request.id}: temperature {request.temperature} is not >= 0")


def check_completion(request: Request, completion: Completion) -> None:
    """Raise EngineError for what must not reach the learner: an answer that is short, not finite or not consistent."""
    problems = list(_array_problems(request, completion))
    head = completion.head
    if head is not None and not problems:
        lines = head_problems(head.ids, head.logprobs, completion.tokens, completion.logprobs)
        problems += [("head", line) for line in lines]
    if problems:
        said = "; ".join(line for _, line in problems)
        raise EngineError(f"request {request.id}: the engine returned {said}", reason=problems[0][0])


def _array_problems(request: Request, completion: Completion) -> Iterator[tuple[str, str]]:
    """(reason, line) of what is wrong with the answer's shapes, log-probs and spans."""
    tokens, logprobs, head = completion.tokens, completion.logprobs, completion.head
    written = len(tokens)
    if not written:
        yield "empty", f"0 tokens, where 1 to {request.max_new_tokens} were asked for"
    elif written > request.max_new_tokens:
        yield "length", f"{written} tokens, where 1 to {request.max_new_tokens} were asked for"
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or (tokens < 0).any():
        yield "tokens", f"token ids of shape {tokens.shape} and type {tokens.dtype} that are not all >= 0"
    if logprobs.shape != (written,):
        yield "short", f"log-probs of shape {logprobs.shape} that are not {written} finite numbers"
    elif not np.isfinite(logprobs).all():
        yield "nonfinite", f"log-probs of shape {logprobs.shape} that are not {written} finite numbers"
    elif written and logprobs.max() > LOGPROB_TOLERANCE:
        yield "logprobs", f"a log-prob of {logprobs.max():.3g}, above 0"
    ends = [0, *(span.end for span in completion.version_spans)]
    if [span.start for span in completion.version_spans] != ends[:-1] or ends[-1] != written:
        yield "spans", f"version spans {completion.version_spans} that do not cover its {written} tokens"
    if head is not None and not (
        head.ids.ndim == 2 and head.ids.shape == head.logprobs.shape and len(head.ids) == written
    ):
        yield "head", f"a head of shapes {head.ids.shape} and {head.logprobs.shape} for its {written} tokens"
