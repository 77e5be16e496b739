"""A session's tokens, exactly as they were sent and received, with what the engine said of those that it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.envs.grading import Grade
from rlx.rollout.engine import Completion
from rlx.types import Sample, StopReason, Task, TopK, VersionSpan


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an environment says of a session that came to its end."""

    grade: Grade
    text: str  # what the policy wrote, decoded for people
    stop_reason: StopReason | None = None  # where the environment ended the session for a reason of its own


@dataclasses.dataclass(eq=False)
class Turn:
    """What the policy was told, and its response: in one part, or several where engines failed in the middle of it."""

    observation: np.ndarray  # int32 [M]
    parts: list[Completion] = dataclasses.field(default_factory=list)

    @property
    def whole(self) -> bool:
        """The response has ended; `StopReason.ABORT` leaves it open."""
        return bool(self.parts) and self.parts[-1].stop_reason is not StopReason.ABORT

    @property
    def num_written(self) -> int:
        return sum(len(p.tokens) for p in self.parts)

    def response(self) -> np.ndarray:
        """int32 [W]"""
        return join([p.tokens for p in self.parts], np.int32)


class Transcript:
    """Turns with their arrays as they came; they are put together once, by `sample`."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.length = 0  # tokens
        self.num_written = 0  # of these, by the policy

    def observe(self, tokens: np.ndarray) -> None:
        """The environment's next words, int32 [M]: begins a turn."""
        self.turns.append(Turn(tokens.astype(np.int32, copy=False)))
        self.length += len(tokens)

    def write(self, part: Completion) -> None:
        """A response, or the next part of it."""
        self.turns[-1].parts.append(part)
        self.length += len(part.tokens)
        self.num_written += len(part.tokens)

    @property
    def answered(self) -> bool:
        """The last thing said is a whole response."""
        return bool(self.turns) and self.turns[-1].whole

    @property
    def stop_reason(self) -> StopReason:
        """Of the last response that has begun."""
        return next(t.parts[-1].stop_reason for t in reversed(self.turns) if t.parts)

    def tokens(self) -> np.ndarray:
        """int32 [N], everything so far: the next request's prompt."""
        return join([a for t in self.turns for a in (t.observation, *(p.tokens for p in t.parts))], np.int32)

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Over the session's token indices; neighbours of one version are one span."""
        spans: list[VersionSpan] = []
        at = 0
        for turn in self.turns:
            at += len(turn.observation)
            for part in turn.parts:
                for span in part.version_spans:
                    start = at + span.start
                    if spans and (spans[-1].version, spans[-1].end) == (span.version, start):
                        start = spans.pop().start
                    spans.append(VersionSpan(span.version, start, at + span.end))
                at += len(part.tokens)
        return tuple(spans)

    def head(self) -> TopK | None:
        """A row for each written token; None where a part has none."""
        heads = [p.head for t in self.turns for p in t.parts]
        known = [h for h in heads if h is not None]
        if not known or len(known) < len(heads):
            return None
        return TopK(join([h.ids for h in known], np.int32), join([h.logprobs for h in known], np.float32))

    def routes(self) -> np.ndarray | None:
        """A row for each written token; None where a part has none."""
        found = [p.routes for t in self.turns for p in t.parts]
        known = [r for r in found if r is not None]
        return np.concatenate(known) if known and len(known) == len(found) else None

    def sample(
        self, task: Task, group: int, index: int, verdict: Verdict, stop: StopReason, *, zero_truncated: bool
    ) -> Sample:
        """The session as it is trained on: without what was said to the policy after its last word.

        zero_truncated: a response cut by a length limit gets reward 0, whatever its grade.
        """
        last = max((i for i, turn in enumerate(self.turns) if turn.parts), default=-1)
        tokens: list[np.ndarray] = []
        logprobs: list[np.ndarray] = []
        written: list[np.ndarray] = []
        for turn in self.turns[: last + 1]:
            tokens += [turn.observation, *(p.tokens for p in turn.parts)]
            logprobs += [np.zeros(len(turn.observation), np.float32), *(p.logprobs for p in turn.parts)]
            written += [np.zeros(len(turn.observation), bool), np.ones(turn.num_written, bool)]
        zeroed = stop is StopReason.LENGTH and zero_truncated
        return Sample(
            task=task,
            group=group,
            index=index,
            tokens=join(tokens, np.int32),
            mask=join(written, bool),
            logprobs=join(logprobs, np.float32),
            head=self.head(),
            version_spans=self.version_spans(),
            stop_reason=stop,
            text=verdict.text,
            reward=0.0 if zeroed else verdict.grade.reward,
            grade=dataclasses.asdict(verdict.grade),
            routes=self.routes(),
        )

    # ------------------------------------------------------------------------------------------------------- resuming

    def get_state(self) -> list[dict[str, Any]]:
        """A tree of plain values and arrays; see `rlx.rollout.records`."""
        return [{"observation": t.observation, "parts": [_part_state(p) for p in t.parts]} for t in self.turns]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Transcript:
        transcript = cls()
        for turn in state:
            transcript.observe(turn["observation"])
            for part in turn["parts"]:
                transcript.write(_part(part))
        return transcript


def join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Arrays end to end; one alone is not copied."""
    if len(arrays) == 1:
        return arrays[0].astype(dtype, copy=False)
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _part_state(part: Completion) -> dict[str, Any]:
    head = None if part.head is None else {"ids": part.head.ids, "logprobs": part.head.logprobs}
    return {
        "tokens": part.tokens,
        "logprobs": part.logprobs,
        "head": head,
        "version_spans": [list(dataclasses.astuple(s)) for s in part.version_spans],
        "stop_reason": part.stop_reason.value,
        "routes": part.routes,
    }


def _part(state: Mapping[str, Any]) -> Completion:
    head = state["head"]
    return Completion(
        tokens=state["tokens"],
        logprobs=state["logprobs"],
        head=None if head is None else TopK(head["ids"], head["logprobs"]),
        version_spans=tuple(VersionSpan(*s) for s in state["version_spans"]),
        stop_reason=StopReason(state["stop_reason"]),
        routes=state["routes"],
    )
