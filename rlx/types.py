"""Host records that travel between tasks, engines, graders and the learner. numpy only; nothing here imports jax.

One convention for every per-token array: a token's statistics are stored at the token's *own* index. `logprobs[t]` is
log p(tokens[t] | tokens[:t]); at tokens the policy did not write (the prompt, tool output) `mask` is False and the
log-prob is 0.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

AGE_BINS = (0, 1, 2, 3, 4, 8, 16)  # lower edges, updates
LENGTH_BINS = (0, 64, 256, 1024, 4096, 16384)  # lower edges, written tokens of a sample


def bin_labels(edges: tuple[int, ...]) -> tuple[str, ...]:
    """("0", "1", "2-3", "4+") for (0, 1, 2, 4)."""
    spans = itertools.pairwise(edges)
    return (*(str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in spans), f"{edges[-1]}+")


class StopReason(enum.StrEnum):
    """Why a response ended. Each has a metric of its own."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # max_new_tokens or the engine's context was reached
    ABORT = "abort"  # cancelled by the caller
    SESSION_LIMIT = "session_limit"  # the session had session_token_limit tokens; graded on its work so far
    TURN_LIMIT = "turn_limit"  # the session had tools.max_turns responses and called a tool in the last one; as above
    TOOL_LIMIT = "tool_limit"  # the session's tools had run for tools.session_seconds; as above


class Count(NamedTuple):
    """What the ledger counts in."""

    tokens: int = 0
    samples: int = 0
    groups: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other)))

    def minus(self, other: Count) -> Count:
        return Count(*(a - b for a, b in zip(self, other)))


class RowShape(NamedTuple):
    """Where the parts of a packed row lie, if not anywhere: in its first `prefix` tokens what its samples begin with,
    in each of the `samples` equal parts of the rest one sample's own tokens."""

    prefix: int
    samples: int

    def own_tokens(self, row_tokens: int) -> int:
        """Room of one sample."""
        return (row_tokens - self.prefix) // self.samples

    def keys(self, row_tokens: int) -> int:
        """That attention has of a row: each part, the beginning's too, has the beginning's and its own."""
        return (self.samples + 1) * (self.prefix + self.own_tokens(row_tokens))


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem. `id` is stable across runs: "<source>/<index>"."""

    id: str
    source: str  # the key under `tasks.sources`
    question: str
    answer: str | None  # the gold answer where there is one string of it
    grader: str  # a name known to `rlx.envs.graders`
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the grader needs, JSON-serialisable


@dataclasses.dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sample were written by policy `version` (optimizer updates so far)."""

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class TopK:
    """The sampler's K likeliest tokens at each of W written tokens, under the sampling distribution."""

    ids: np.ndarray  # int32 [W, K], distinct in a row
    logprobs: np.ndarray  # float32 [W, K], descending


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One graded attempt at a task: prompt and response as one sequence of N token ids."""

    task: Task
    group: int  # samples of one group share it; unique among the training groups of a run
    index: int  # position in the group
    tokens: np.ndarray  # int32 [N]
    mask: np.ndarray  # bool [N]: the policy wrote this token
    logprobs: np.ndarray  # float32 [N], under the distribution that sampled it
    head: TopK | None  # W = mask.sum() rows
    version_spans: tuple[VersionSpan, ...]  # over token indices; cover exactly the written tokens
    stop_reason: StopReason
    text: str  # the response, decoded for people and graders
    reward: float
    grade: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the grader said beside the reward
    # int16 [W, layers of experts, k]: the experts that the token before each written one was sent to, where recorded.
    routes: np.ndarray | None = None

    @property
    def num_written(self) -> int:
        return int(self.mask.sum())

    @property
    def oldest_version(self) -> int:
        return min((s.version for s in self.version_spans), default=0)


@dataclasses.dataclass(frozen=True)
class Group:
    """The samples of one task instance: what a group-relative advantage is computed over. G, less those that failed."""

    task: Task
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> np.ndarray:
        return np.array([s.reward for s in self.samples], np.float32)

    @property
    def has_signal(self) -> bool:
        """False where all rewards are equal: the group's advantages are all zero."""
        return bool(np.ptp(self.rewards) > 0) if self.samples else False
