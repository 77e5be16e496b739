"""What a producer has under way: groups that are not complete, and the sessions of their samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlx.rollout.collect import sample_seeds
from rlx.rollout.records import read_sample, read_task, sample_tree, task_tree
from rlx.rollout.transcript import Transcript
from rlx.types import Count, Group, Sample, StopReason, Task

_AGAIN = 1 << 40  # added to a group's number each time its task is tried again


def number_again(number: int) -> int:
    """The number of the group that tries the task of group `number` again: no other group's, and always the same."""
    return number + _AGAIN


@dataclasses.dataclass(eq=False)
class OpenGroup:
    """A group from its first sample's submission to its last one's end."""

    number: int
    task: Task
    seeds: tuple[int, ...]
    samples: list[Sample | None]  # by index; None: not graded
    submitted: int = 0
    left: int = 0  # samples that have not ended
    booked: bool = False  # counted as a group by the ledger

    @classmethod
    def begin(cls, number: int, task: Task, seed: int, size: int) -> OpenGroup:
        return cls(number, task, sample_seeds(seed, number, size), [None] * size, left=size)

    def graded(self) -> Group:
        return Group(self.task, tuple(s for s in self.samples if s is not None))

    def get_state(self) -> dict[str, Any]:
        samples = [None if s is None else sample_tree(s) for s in self.samples]
        plain = {name: getattr(self, name) for name in ("number", "submitted", "left", "booked")}
        return plain | {"task": task_tree(self.task), "seeds": list(self.seeds), "samples": samples}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OpenGroup:
        task = read_task(state["task"])
        samples = [None if s is None else read_sample(task, s) for s in state["samples"]]
        return cls(**{**state, "task": task, "seeds": tuple(state["seeds"]), "samples": samples})


@dataclasses.dataclass(eq=False)
class Session:
    """One sample from its submission to its grade."""

    group: OpenGroup
    index: int
    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    stop: StopReason | None = None  # why it ended; None: it is being played
    booked: bool = False  # counted as a sample by the ledger
    engine: str | None = None  # that served it last

    @property
    def key(self) -> tuple[int, int]:
        return self.group.number, self.index

    def get_state(self) -> dict[str, Any]:
        return {
            "group": self.group.number,
            "index": self.index,
            "transcript": self.transcript.get_state(),
            "booked": self.booked,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], group: OpenGroup) -> Session:
        return cls(group, state["index"], Transcript.from_state(state["transcript"]), booked=state["booked"])


def holding(group: OpenGroup, sessions: Mapping[tuple[int, int], Session]) -> Count:
    """What the ledger has in flight for an open group, counted from its samples and transcripts."""
    tokens = samples = 0
    for index, sample in enumerate(group.samples):
        session = sessions.get((group.number, index))
        if sample is not None:
            tokens, samples = tokens + sample.num_written, samples + 1
        elif session is not None:
            tokens, samples = tokens + session.transcript.num_written, samples + session.booked
    return Count(tokens, samples, int(group.booked))
