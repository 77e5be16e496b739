"""An engine that says given texts, one after the other, and what a training run needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.envs.chat import ChatTokenizer
from rlx.envs.grading import Grade, Outcome
from rlx.rollout.engine import Completion, EngineError, Request, check_request
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task, VersionSpan


class Speaking:
    """Texts end with an end of turn, unless max_new_tokens cuts them; "fails" as a text is an engine's failure."""

    def __init__(
        self, tokenizer: ChatTokenizer, texts: Sequence[str], context: int = 4096, gate: asyncio.Event | None = None
    ):
        self.tokenizer, self.texts, self.context, self.gate = tokenizer, list(texts), context, gate
        self.name, self.admission, self.version = "speaking", 4, 3
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        check_request(request, self.tokenizer.vocab_size, self.context)
        self.requests.append(request)
        await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        return [self._say(self.texts.pop(0), request) for _ in request.seeds]

    def _say(self, text: str, request: Request) -> Completion:
        if text == "fails":
            raise EngineError("it fell over", reason="dead")
        ids = [*self.tokenizer.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.end_of_turn_id]
        cut = len(ids) > request.max_new_tokens
        tokens = np.array(ids[: request.max_new_tokens], np.int32)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 100
        spans = (VersionSpan(self.version, 0, len(tokens)),)
        return Completion(tokens, logprobs, None, spans, StopReason.LENGTH if cut else StopReason.STOP)

    async def load(self, weights: Any, version: int, /) -> None:
        self.version = version


async def judge(task: Task, result: str, transcript: Transcript) -> Verdict:
    """Reward 1 where the agent's result is the answer."""
    return Verdict(Grade(float(result.strip() == task.answer), result, "", 0.0, Outcome.GRADED), result)
