"""What a producer and its buffer hold, as a tree that `rlx.rollout.records` packs; and back, after a process ended.

A checkpoint holds the tree, the ledger and the task stream of one moment. After a kill the journal brings the groups
that finished since: they are buffered again in their order, whatever had become of them, because the updates made of
them are undone as well. Partial sessions go on at the response that they wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlx.rollout.fates import count
from rlx.rollout.journal import Entry
from rlx.rollout.producer import Producer
from rlx.rollout.records import group_tree, read_group, read_task, task_tree
from rlx.rollout.work import OpenGroup, Session, holding
from rlx.types import Count


def get_state(producer: Producer) -> dict[str, Any]:
    """Everything that reached this process and is not in a final bin. Raises RuntimeError while a batch is out."""
    return {
        "buffered": [group_tree(group) for group in producer.buffer.groups()],
        "groups": [group.get_state() for group in producer.groups.values()],
        "sessions": [session.get_state() for session in producer.open.values()],
        "returned": [[number, task_tree(task)] for number, task in producer.returned],
        "finished": list(producer.finished),
    }


def set_state(producer: Producer, state: Mapping[str, Any]) -> None:
    """Before the producer is entered. The ledger must have the state of the same moment."""
    for group in state["buffered"]:
        producer.buffer.add(read_group(group))
    for tree in state["groups"]:
        group = OpenGroup.from_state(tree)
        producer.groups[group.number] = group
    for tree in state["sessions"]:
        session = Session.from_state(tree, producer.groups[tree["group"]])
        producer.open[session.key] = session
    producer.returned.extend((number, read_task(task)) for number, task in state["returned"])
    producer.finished |= dict.fromkeys(state["finished"])
    producer.requeue()


def recover(producer: Producer, entries: Iterable[Entry]) -> list[Count]:
    """After `set_state`: take over the groups that finished since, each once.

    Returns the dead process's total at the last of them, none or one, for `Ledger.book_lost`.
    """
    last: list[Count] = []
    for entry in entries:
        last = [entry.generated]
        if entry.number not in producer.finished:
            producer.finished[entry.number] = None
            _replay(producer, entry)
    producer.requeue()
    return last


def _replay(producer: Producer, entry: Entry) -> None:
    """Books what the group has beyond the checkpoint, and what the checkpoint has of it that is not in the group."""
    before = producer.groups.pop(entry.number, None)
    had = Count() if before is None else holding(before, producer.open)
    known = {} if before is None else {i: producer.open.pop((entry.number, i), None) for i in range(len(before.seeds))}
    tokens = samples = 0  # of the group, that the ledger has
    for sample in entry.group.samples:
        session = known.get(sample.index)
        if session is not None:
            begun = session.transcript.tokens()
            goes_on = np.array_equal(sample.tokens[: len(begun)], begun)  # otherwise it began anew
            tokens, samples = tokens + session.transcript.num_written * goes_on, samples + session.booked
        elif before is not None and before.samples[sample.index] is not None:
            tokens, samples = tokens + sample.num_written, samples + 1
    producer.books.move("in_flight", "lost", had.tokens - tokens, had.samples - samples)
    whole = count(entry.group.samples)
    producer.books.generated(whole.tokens - tokens, whole.samples - samples, 1 - had.groups)
    producer.buffer.put(entry.group, producer.fleet.version)
