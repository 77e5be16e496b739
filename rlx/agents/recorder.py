"""Sessions of outside agents on an engine of their own: what each was told and wrote, as ids with their log-probs.

A session is one segment as long as its client goes on from what was said. A client that rewrites history begins another
segment; each is a sequence of its own to train on, and says where the one before was rewritten.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rlx.agents.conversation import ClientConversation, Format
from rlx.agents.openai import ChatRequest, Message, Reply, RequestInvalid
from rlx.rollout.engine import Engine, Request, RequestRefused, check_completion
from rlx.rollout.transcript import Transcript, Verdict, join
from rlx.types import Sample, Task


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request asks for where it says nothing, and the most that it may."""

    context: int  # tokens of a segment
    max_new_tokens: int  # of one response
    temperature: float
    seed: int


@dataclasses.dataclass(eq=False)
class Segment:
    transcript: Transcript
    temperatures: list[float]  # of the responses
    max_tokens: list[int]  # that each of them might have
    rewritten: int | None  # index of the message that its client told otherwise than before; None: the session's first
    messages: tuple[Message, ...] = ()


class Recorder:
    """One session: an `Answerer`."""

    def __init__(self, name: str, number: int, engine: Engine, form: Format, limits: Limits):
        self.name, self._number = name, number
        self._engine, self._limits = engine, limits
        self._conversation = ClientConversation(form)
        self.segments: list[Segment] = []
        self._asked = 0

    async def answer(self, request: ChatRequest) -> Reply:
        told = self._conversation.told(request)
        goes_on = self.segments and told.rewritten is None
        segment = self.segments[-1] if goes_on else Segment(Transcript(), [], [], told.rewritten)
        asked = self._request(request, join([segment.transcript.tokens(), told.tokens], np.int32))
        [completion] = await self._engine.generate(asked)
        check_completion(asked, completion)
        if not goes_on:
            self.segments.append(segment)
        segment.transcript.observe(told.tokens)
        segment.transcript.write(completion)
        segment.temperatures.append(asked.temperature)
        segment.max_tokens.append(asked.max_new_tokens)
        message = self._conversation.said(request, completion.tokens)
        segment.messages = (*request.messages, message)
        return Reply(message, completion.stop_reason, len(asked.prompt), len(completion.tokens))

    def _request(self, request: ChatRequest, prompt: np.ndarray) -> Request:
        limits = self._limits
        if (request.max_tokens or 0) > limits.max_new_tokens:
            raise RequestInvalid(
                f"max_tokens = {request.max_tokens}: a response has at most {limits.max_new_tokens} tokens "
                "(rollout.max_new_tokens of the recipe); ask for fewer or leave it out"
            )
        room = limits.context - len(prompt)
        if room < 1:
            raise RequestRefused(f"the conversation has {len(prompt)} tokens, the context is of {limits.context}")
        place = [limits.seed, self._number, self._asked]
        self._asked += 1
        return Request(
            id=f"{self.name}:{self._asked}",
            prompt=prompt,
            seeds=(int(np.random.SeedSequence(place).generate_state(1, np.uint32)[0]),),
            max_new_tokens=min(room, request.max_tokens or limits.max_new_tokens),
            temperature=limits.temperature if request.temperature is None else request.temperature,
        )

    def samples(self, task: Task, group: int, index: int, verdict: Verdict) -> list[Sample]:
        """A sample of each segment; all have the session's one verdict."""
        return [
            s.transcript.sample(task, group, index, verdict, s.transcript.stop_reason, zero_truncated=False)
            for s in self.segments
        ]

    def to_dict(self) -> dict[str, Any]:
        """The session as JSON: for every segment ids, which of them the policy wrote, log-probs, versions."""
        return {"session": self.name, "segments": [_segment(s) for s in self.segments]}


def _segment(segment: Segment) -> dict[str, Any]:
    transcript = segment.transcript
    logprobs: list[np.ndarray] = []
    written: list[np.ndarray] = []
    for turn in transcript.turns:
        logprobs += [np.zeros(len(turn.observation), np.float32), *(p.logprobs for p in turn.parts)]
        written += [np.zeros(len(turn.observation), bool), np.ones(turn.num_written, bool)]
    return {
        "rewritten": segment.rewritten,
        "messages": list(segment.messages),
        "tokens": transcript.tokens().tolist(),
        "mask": join(written, bool).tolist(),
        "logprobs": join(logprobs, np.float32).tolist(),
        "version_spans": [list(dataclasses.astuple(span)) for span in transcript.version_spans()],
        "stop_reasons": [turn.parts[-1].stop_reason.value for turn in transcript.turns],
        "temperatures": list(segment.temperatures),
        "max_tokens": list(segment.max_tokens),
    }
