"""What becomes of a graded group: which of its samples are trained on, and where the others end."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from rlx.envs.grading import Outcome
from rlx.types import Count, Group, Sample, StopReason, TopK, VersionSpan


@dataclasses.dataclass(frozen=True)
class Rules:
    collection: int  # groups of a batch
    max_lag: int  # updates
    filter_no_signal: bool
    mask_truncated: bool
    train_token_limit: int  # tokens of a sample, prompt included
    cut_long: bool  # cut samples beyond the limit; otherwise they are dropped
    return_stale: bool  # the task of a stale group is tried again


def graded(group: Group) -> Group:
    """The group without samples whose grading failed: they say nothing about the policy."""
    kept = tuple(s for s in group.samples if s.grade["outcome"] == Outcome.GRADED)
    return group if len(kept) == len(group.samples) else dataclasses.replace(group, samples=kept)


def ungraded(group: Group) -> dict[str, list[Sample]]:
    """The samples whose grading failed, by the bin that says how."""
    bins: dict[str, list[Sample]] = {}
    for sample in group.samples:
        if sample.grade["outcome"] != Outcome.GRADED:
            bins.setdefault(f"failed/grader_{sample.grade['outcome']}", []).append(sample)
    return bins


@dataclasses.dataclass(frozen=True)
class Fate:
    """Where the graded samples of a group go."""

    trained: tuple[Sample, ...]  # into the loss
    dropped: dict[str, list[Sample]]  # whole samples, by bin
    cut: tuple[tuple[Sample, Sample], ...]  # of those trained: (as it was, as it is trained)


def fate(group: Group, rules: Rules) -> Fate:
    """Of the graded samples of a group that is not stale."""
    group = graded(group)
    if rules.filter_no_signal and not group.has_signal:
        return Fate((), {"no_signal": list(group.samples)} if group.samples else {}, ())
    trained: list[Sample] = []
    dropped: dict[str, list[Sample]] = {}
    cut: list[tuple[Sample, Sample]] = []
    for sample in group.samples:
        if rules.mask_truncated and sample.stop_reason is StopReason.LENGTH:
            dropped.setdefault("masked", []).append(sample)
        elif len(sample.tokens) <= rules.train_token_limit:
            trained.append(sample)
        elif rules.cut_long and sample.mask[: rules.train_token_limit].any():
            trained.append(shortened(sample, rules.train_token_limit))
            cut.append((sample, trained[-1]))
        else:
            dropped.setdefault("too_long", []).append(sample)
    return Fate(tuple(trained), dropped, tuple(cut))


def shortened(sample: Sample, length: int) -> Sample:
    """The first `length` tokens of a sample."""
    kept = int(sample.mask[:length].sum())
    spans = (VersionSpan(s.version, s.start, min(s.end, length)) for s in sample.version_spans if s.start < length)
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[:length],
        mask=sample.mask[:length],
        logprobs=sample.logprobs[:length],
        head=None if sample.head is None else TopK(sample.head.ids[:kept], sample.head.logprobs[:kept]),
        version_spans=tuple(spans),
    )


def count(samples: Iterable[Sample]) -> Count:
    """Tokens written, and samples."""
    lengths = [s.num_written for s in samples]
    return Count(sum(lengths), len(lengths))


def span_ages(spans: Iterable[VersionSpan], version: int) -> Counter[int]:
    """Tokens by their age in updates."""
    found: Counter[int] = Counter()
    for span in spans:
        found[version - span.version] += span.end - span.start
    return found


def ages(samples: Iterable[Sample], version: int) -> Counter[int]:
    """Written tokens by their age in updates."""
    return span_ages((span for s in samples for span in s.version_spans), version)


def oldest(samples: Iterable[Sample]) -> int | None:
    return min((span.version for s in samples for span in s.version_spans), default=None)


def newest(samples: Iterable[Sample]) -> int | None:
    return max((span.version for s in samples for span in s.version_spans), default=None)
