"""The interface of an inference engine: token ids in, token ids with their statistics out. Nothing is detokenised."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from rlx.algos.head_records import head_problems
from rlx.types import StopReason, TopK, VersionSpan


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


class EngineError(RuntimeError):
    """A request that the engine cannot serve, or a response that it must not have given."""


class Engine(Protocol):
    async def generate(self, request: Request) -> list[Completion]:
        """The request's samples in the order of its seeds. Raises EngineError for a request that cannot be served."""
        ...


def check_request(request: Request, vocab_size: int, context: int) -> None:
    """Raise EngineError for what no engine should be sent."""
    prompt = request.prompt
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer) or not len(prompt):
        raise EngineError(f"request {request.id}: the prompt must be a non-empty 1-D integer array, got {prompt!r}")
    if len(prompt) >= context:
        raise EngineError(
            f"request {request.id}: a prompt of {len(prompt)} tokens leaves no room in a context of {context}. "
            "Raise engine.context or shorten the prompt."
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise EngineError(f"request {request.id}: token ids must be in [0, {vocab_size}), got up to {prompt.max()}")
    if request.max_new_tokens < 1 or not request.seeds:
        raise EngineError(f"request {request.id}: at least one sample of at least one token must be asked for")
    if not all(0 <= seed < 2**32 for seed in request.seeds):
        raise EngineError(f"request {request.id}: seeds must be in [0, 2**32), got {request.seeds}")
    if not request.temperature >= 0:
        raise EngineError(f"request {request.id}: temperature {request.temperature} is not >= 0")


def check_completion(request: Request, completion: Completion) -> None:
    """Raise EngineError for what must not reach the learner: an answer that is short, not finite or not consistent."""
    written, problems = len(completion.tokens), []
    if not 1 <= written <= request.max_new_tokens:
        problems.append(f"{written} tokens, where 1 to {request.max_new_tokens} were asked for")
    if completion.logprobs.shape != (written,) or not np.isfinite(completion.logprobs).all():
        problems.append(f"log-probs of shape {completion.logprobs.shape} that are not {written} finite numbers")
    ends = [0, *(span.end for span in completion.version_spans)]
    if [span.start for span in completion.version_spans] != ends[:-1] or ends[-1] != written:
        problems.append(f"version spans {completion.version_spans} that do not cover its {written} tokens")
    if completion.head is not None and not problems:
        problems += head_problems(completion.head.ids, completion.head.logprobs, completion.tokens, completion.logprobs)
    if problems:
        raise EngineError(f"request {request.id}: the engine returned {'; '.join(problems)}")
