"""One sample that the embedded engine writes: what was asked, and what is written of it so far."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from rlx.rollout.engine import Completion, Request
from rlx.types import StopReason, TopK, VersionSpan


@dataclasses.dataclass(frozen=True)
class Written:
    """What one dispatch wrote of one sample: n tokens."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    head_ids: np.ndarray  # int32 [n, K]
    head_logprobs: np.ndarray  # float32 [n, K]
    routes: np.ndarray | None = None  # int16 [n, layers of experts, k]


@dataclasses.dataclass(eq=False)
class Pending:
    """Sample `index` of a request, from the queue to its completion."""

    request: Request
    index: int
    future: asyncio.Future[Completion]
    parts: list[Written] = dataclasses.field(default_factory=list)
    spans: list[VersionSpan] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.request.prompt, np.int32)  # the prompt, and from `restart` on what was written
        self.key = self.tokens.tobytes()

    @property
    def count(self) -> int:
        """Tokens written."""
        return self.spans[-1].end if self.spans else 0

    @property
    def seed(self) -> int:
        return self.request.seeds[self.index]

    def add(self, part: Written, version: int) -> None:
        """Tokens that `version` wrote."""
        end = self.count + len(part.tokens)
        self.parts.append(part)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = dataclasses.replace(self.spans[-1], end=end)
        else:
            self.spans.append(VersionSpan(version, self.count, end))

    def restart(self) -> None:
        """Make what was written part of `tokens`, whose keys and values are to be computed anew."""
        self.tokens = np.concatenate([self.request.prompt, *(p.tokens for p in self.parts)]).astype(np.int32)
        self.key = self.tokens.tobytes()

    def completion(self, stop_reason: StopReason, *, with_head: bool) -> Completion:
        fields = zip(*((p.tokens, p.logprobs, p.head_ids, p.head_logprobs) for p in self.parts), strict=True)
        tokens, logprobs, head_ids, head_logprobs = (np.concatenate(parts) for parts in fields)
        head = TopK(head_ids, head_logprobs) if with_head else None
        known = [p.routes for p in self.parts if p.routes is not None]
        routes = np.concatenate(known) if known else None
        return Completion(tokens, logprobs, head, tuple(self.spans), stop_reason, routes)
