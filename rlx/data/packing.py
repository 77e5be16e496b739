"""Packing sequences into rows and micro-batches of fixed shape. numpy only.

A row holds whole sequences, side by side and told apart by segment ids, up to `row_tokens` tokens and `row_targets`
target tokens (those the loss is on). The two are counted apart because the output head, a fifth of a small model's
work, runs on targets only. All batches of a run have one shape: `capacity` micro-batches, of which the first
`num_micro_batches` are used, so nothing recompiles however many samples a batch has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlx.types import TopK


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A sequence of N tokens to train on. Per-token arrays sit at the token's own index; see `rlx.types`."""

    tokens: np.ndarray  # int32 [N]
    mask: np.ndarray  # bool [N], never True at index 0: nothing predicts the first token
    advantage: float
    logprobs: np.ndarray  # float32 [N], the sampler's
    ages: np.ndarray  # int32 [N], versions between writing and training
    head: TopK | None  # the sampler's, one row for each masked token


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    row_tokens: int  # T
    row_targets: int  # N
    rows: int  # R of a micro-batch
    capacity: int  # M micro-batches
    head_size: int  # K


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatch:
    """M micro-batches of R rows. Inputs are [M, R, T]; targets, which say what is to be predicted, are [M, R, N]."""

    tokens: np.ndarray  # int32 [M, R, T]
    positions: np.ndarray  # int32 [M, R, T], in the segment
    segment_ids: np.ndarray  # int32 [M, R, T], 0 = padding
    source: np.ndarray  # int32 [M, R, N]: index in the row of the hidden state that predicts this target
    target_tokens: np.ndarray  # int32 [M, R, N]
    mask: np.ndarray  # bool [M, R, N]
    sequences: np.ndarray  # int32 [M, R, N], 1 + index of the trajectory in the batch, 0 = padding
    advantages: np.ndarray  # float32 [M, R, N]
    sampler_logprobs: np.ndarray  # float32 [M, R, N]
    ages: np.ndarray  # int32 [M, R, N]
    head_ids: np.ndarray | None  # int32 [M, R, N, K]
    head_logprobs: np.ndarray | None  # float32 [M, R, N, K]
    num_micro_batches: int

    @property
    def fill_rate(self) -> float:
        """Share of the used rows' tokens that are not padding."""
        used = self.segment_ids[: self.num_micro_batches]
        return float((used > 0).mean()) if used.size else 0.0


def capacity_for(samples: int, longest: int, longest_targets: int, row_tokens: int, row_targets: int, rows: int) -> int:
    """Micro-batches that always hold `samples` trajectories of at most `longest` tokens.

    In first-fit at most one row is at most half full in both measures, so twice the total is enough.
    """
    bound = 2 * (samples * longest / row_tokens + samples * longest_targets / row_targets) + 1
    return -(-min(samples, int(np.ceil(bound))) // rows)


def plan_rows(sizes: Sequence[tuple[int, int]], row_tokens: int, row_targets: int) -> list[list[int]]:
    """First-fit decreasing: which trajectories, given as (tokens, targets), share a row. Equal sizes keep their order.

    Raises ValueError for a trajectory that no row can hold.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
        tokens, targets = sizes[i]
        if tokens > row_tokens or targets > row_targets:
            raise ValueError(
                f"trajectory {i} has {tokens} tokens, {targets} of them targets; a row holds {row_tokens} and "
                f"{row_targets}. Raise learner.row_tokens or learner.row_targets, or shorten the samples."
            )
        at = next((j for j, (t, n) in enumerate(free) if t >= tokens and n >= targets), None)
        if at is None:
            rows.append([i])
            free.append((row_tokens - tokens, row_targets - targets))
        else:
            rows[at].append(i)
            free[at] = (free[at][0] - tokens, free[at][1] - targets)
    return rows


def pack(trajectories: Sequence[Trajectory], config: PackingConfig) -> PackedBatch:
    """Lay trajectories out in rows. Raises ValueError where one does not fit, or all together exceed the capacity."""
    for i, trajectory in enumerate(trajectories):
        _check(i, trajectory, config)
    sizes = [(len(t.tokens), int(t.mask.sum())) for t in trajectories]
    rows = plan_rows(sizes, config.row_tokens, config.row_targets)
    if len(rows) > config.capacity * config.rows:
        raise ValueError(
            f"{len(trajectories)} trajectories need {len(rows)} rows; the batch has "
            f"{config.capacity} micro-batches of {config.rows}. Raise the capacity or pack fewer."
        )
    batch = _empty(config, -(-len(rows) // config.rows))
    for r, members in enumerate(rows):
        at = divmod(r, config.rows)
        start = written = 0
        for segment, i in enumerate(members, start=1):
            tokens, targets = sizes[i]
            _place(batch, at, start, written, segment, i, trajectories[i])
            start, written = start + tokens, written + targets
    return batch


def _check(i: int, trajectory: Trajectory, config: PackingConfig) -> None:
    if len(trajectory.mask) and trajectory.mask[0]:
        raise ValueError(f"trajectory {i}: its first token is masked in, but nothing precedes it to predict it")
    wanted = (int(trajectory.mask.sum()), config.head_size)
    if config.head_size and (trajectory.head is None or trajectory.head.ids.shape != wanted):
        have = "no head" if trajectory.head is None else f"a head of {list(trajectory.head.ids.shape)}"
        raise ValueError(f"trajectory {i}: {have}; {list(wanted)} expected, candidates for each masked token")


def _empty(config: PackingConfig, used: int) -> PackedBatch:
    inputs = (config.capacity, config.rows, config.row_tokens)
    targets = (config.capacity, config.rows, config.row_targets)
    head = (*targets, config.head_size)
    return PackedBatch(
        tokens=np.zeros(inputs, np.int32),
        positions=np.zeros(inputs, np.int32),
        segment_ids=np.zeros(inputs, np.int32),
        source=np.zeros(targets, np.int32),
        target_tokens=np.zeros(targets, np.int32),
        mask=np.zeros(targets, bool),
        sequences=np.zeros(targets, np.int32),
        advantages=np.zeros(targets, np.float32),
        sampler_logprobs=np.zeros(targets, np.float32),
        ages=np.zeros(targets, np.int32),
        head_ids=np.zeros(head, np.int32) if config.head_size else None,
        head_logprobs=np.zeros(head, np.float32) if config.head_size else None,
        num_micro_batches=used,
    )


def _place(
    batch: PackedBatch, at: tuple[int, int], start: int, written: int, segment: int, i: int, trajectory: Trajectory
) -> None:
    """Write one trajectory into row `at`: its tokens from `start`, its targets from `written`."""
    span = (*at, slice(start, start + len(trajectory.tokens)))
    batch.tokens[span] = trajectory.tokens
    batch.positions[span] = np.arange(len(trajectory.tokens))
    batch.segment_ids[span] = segment

    chosen = np.flatnonzero(trajectory.mask)
    span = (*at, slice(written, written + len(chosen)))
    batch.source[span] = start + chosen - 1
    batch.target_tokens[span] = trajectory.tokens[chosen]
    batch.mask[span] = True
    batch.sequences[span] = i + 1
    batch.advantages[span] = trajectory.advantage
    batch.sampler_logprobs[span] = trajectory.logprobs[chosen]
    batch.ages[span] = trajectory.ages[chosen]
    if batch.head_ids is not None and batch.head_logprobs is not None and trajectory.head is not None:
        batch.head_ids[span] = trajectory.head.ids
        batch.head_logprobs[span] = trajectory.head.logprobs
