"""Which samples are worth a look: of the groups that taught something, the best and the worst."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlx.metrics.view import Record, number
from rlx.types import Group, Sample


def shown_samples(groups: Sequence[Group], most: int) -> list[Sample]:
    """At most `most` samples: the best and the worst of each group, groups with different rewards first, one pair of
    every group before a second of any."""
    ranked = [_extremes_first(group) for group in sorted(groups, key=lambda g: not g.has_signal)]
    pairs = max((len(samples) + 1) // 2 for samples in ranked) if ranked else 0
    in_turn = [sample for i in range(pairs) for samples in ranked for sample in samples[2 * i : 2 * i + 2]]
    return in_turn[:most]


def num_turns(record: Record) -> int:
    """Stretches of tokens that the policy wrote, with something said to it between each two."""
    spans = sorted((start, end) for _, start, end in record["versions"])
    return len(spans) - sum(a[1] == b[0] for a, b in itertools.pairwise(spans))


def is_due(update: int, every: int, last: int) -> bool:
    """Whether an update's samples are shown: every `every` updates and at the last one."""
    return update % every == 0 or update == last


def _extremes_first(group: Group) -> list[Sample]:
    """Best, worst, second best, second worst, ...; the earlier sample first where rewards are equal."""
    best = sorted(group.samples, key=lambda s: (-s.reward, s.index))
    worst = sorted(group.samples, key=lambda s: (s.reward, s.index))
    order: dict[int, Sample] = {}
    for pair in zip(best, worst, strict=True):
        for sample in pair:
            order.setdefault(sample.index, sample)
    return list(order.values())


def extremes(records: Sequence[Record], count: int) -> tuple[list[Record], list[Record]]:
    """The best and the worst of the last update that has samples with different rewards, one of a task first."""
    training = [r for r in records if r.get("phase") == "train"] or list(records)
    by_update: dict[int, list[Record]] = {}
    for record in training:
        by_update.setdefault(record["update"], []).append(record)
    for update in sorted(by_update, reverse=True):
        found = by_update[update]
        if len({r["reward"] for r in found}) > 1:
            best = _one_of_a_task_first(sorted(found, key=lambda r: -number(r["reward"])))
            worst = _one_of_a_task_first(sorted(found, key=lambda r: number(r["reward"])))
            low, high = worst[0]["reward"], best[0]["reward"]
            return [r for r in best if r["reward"] > low][:count], [r for r in worst if r["reward"] < high][:count]
    last = by_update[max(by_update)] if by_update else []
    return [], last[:count]


def _one_of_a_task_first(ranked: list[Record]) -> list[Record]:
    """Keeps equal rewards together; among them a second sample of a task comes after the first of every task."""
    seen: dict[tuple[float, str], int] = {}
    turns = []
    for record in ranked:
        key = (number(record["reward"]), record["task"])
        turns.append(seen.get(key, 0))
        seen[key] = turns[-1] + 1
    rewards = list(dict.fromkeys(r["reward"] for r in ranked))
    order = sorted(range(len(ranked)), key=lambda i: (rewards.index(ranked[i]["reward"]), turns[i]))
    return [ranked[i] for i in order]
