"""Packing sequences into rows and micro-batches of fixed shape. numpy only.

A row holds segments side by side, up to `row_tokens` tokens and `row_targets` target tokens (those the loss is on). A
sequence is one segment, or two where others of its group begin alike: the beginning that they share, laid out once, and
its own. What comes behind the last token that predicts a target is left out. Micro-batches have one shape whatever a
batch holds, so nothing recompiles; a batch has as many of them as it needs.

With a `row_shape` a row holds samples of one group, and each part begins where that says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlx.data.balance import balanced
from rlx.data.rows import Family, Member, plan_fixed_rows, plan_rows
from rlx.types import RowShape, TopK


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A sequence of N tokens to train on. Per-token arrays sit at the token's own index; see `rlx.types`."""

    tokens: np.ndarray  # int32 [N]
    mask: np.ndarray  # bool [N], never True at index 0: nothing predicts the first token
    advantage: float
    logprobs: np.ndarray  # float32 [N], the sampler's
    ages: np.ndarray  # int32 [N], versions between writing and training
    head: TopK | None  # the sampler's, one row for each masked token
    group: int | None = None  # sequences of one group may share the tokens that they all begin with
    # int32 [N, layers of experts, k]: the experts that an engine sent each token to, negative where it did not say.
    routes: np.ndarray | None = None
    # What frozen policies say of its W targets and their K candidates, by names of `rlx.algos.objective.Targets`:
    # [W] or [W, K] each.
    frozen: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class FrozenArray(NamedTuple):
    """An array of `Trajectory.frozen`."""

    name: str
    candidates: int  # K, 0 where there is one value a target
    dtype: str


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    row_tokens: int  # T
    row_targets: int  # N
    rows: int  # R of a micro-batch
    capacity: int  # the most micro-batches
    head_size: int  # K
    share_prefixes: bool = True
    routes: tuple[int, int] | None = None  # layers of experts and k, where routes are replayed
    balance_experts: bool = False  # order rows by their routes so that micro-batches spread over experts
    frozen: tuple[FrozenArray, ...] = ()  # that every trajectory has
    row_shape: RowShape | None = None  # None = parts side by side, of as many groups as a row has room for

    def __post_init__(self) -> None:
        if self.row_shape is not None and not self.share_prefixes:
            raise ValueError(f"rows of {self.row_shape} are of samples that share their beginning: share prefixes")


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatch:
    """M micro-batches of R rows. Inputs are [M, R, T]; targets, which say what is to be predicted, are [M, R, N].

    M is at least 1: a batch without a target is one micro-batch of padding.
    """

    tokens: np.ndarray  # int32 [M, R, T]
    positions: np.ndarray  # int32 [M, R, T], in the sequence
    segment_ids: np.ndarray  # int32 [M, R, T], 0 = padding
    prefix_ids: np.ndarray  # int32 [M, R, T]: the segment of the row that this one continues, 0 = none
    source: np.ndarray  # int32 [M, R, N]: index in the row of the hidden state that predicts this target
    target_tokens: np.ndarray  # int32 [M, R, N]
    mask: np.ndarray  # bool [M, R, N]
    sequences: np.ndarray  # int32 [M, R, N], 1 + index of the trajectory in the batch, 0 = padding
    lengths: np.ndarray  # int32 [M, R, N]: targets of that trajectory
    advantages: np.ndarray  # float32 [M, R, N]
    sampler_logprobs: np.ndarray  # float32 [M, R, N]
    ages: np.ndarray  # int32 [M, R, N]
    head_ids: np.ndarray | None  # int32 [M, R, N, K]
    head_logprobs: np.ndarray | None  # float32 [M, R, N, K]
    routes: np.ndarray | None  # int32 [M, R, T, layers of experts, k], negative where none is recorded
    num_sequences: int  # with a target
    unshared_tokens: int  # that would be computed if each sequence were laid out whole
    frozen: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # [M, R, N] or [M, R, N, K] each
    row_shape: RowShape | None = None

    @property
    def num_micro_batches(self) -> int:
        """Those that hold anything."""
        return int((self.segment_ids > 0).any((1, 2)).sum())

    @property
    def num_targets(self) -> int:
        return int(self.mask.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, without padding."""
        return int((self.segment_ids > 0).sum())

    @property
    def fill_rate(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return self.num_tokens / self.segment_ids.size

    @property
    def shared_fraction(self) -> float:
        """Share of the sequences' tokens that prefix sharing saves."""
        return 1 - self.num_tokens / self.unshared_tokens if self.unshared_tokens else 0.0


def computed_tokens(trajectory: Trajectory) -> int:
    """Tokens that the loss depends on: those up to the last one that predicts a target."""
    return int(np.flatnonzero(trajectory.mask)[-1]) if trajectory.mask.any() else 0


def families(
    trajectories: Sequence[Trajectory], share_prefixes: bool, longest_prefix: int | None = None
) -> list[Family]:
    """What the planner of rows takes: the groups, each with the tokens that its sequences share; other sequences alone.

    Shared are the leading tokens that all sequences of a group have in common and none trains on. A sequence without
    a target is left out: nothing would come of it.

    longest_prefix: the most tokens that are shared, and a sequence alone is cut in two as others are; None = any
      number, and it is left whole.
    """
    together: dict[tuple[int | None, int], list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if trajectory.mask.any():
            grouped = share_prefixes and trajectory.group is not None
            together.setdefault((trajectory.group, 0) if grouped else (None, i), []).append(i)
    found = []
    for indices in together.values():
        cut = longest_prefix is not None or len(indices) > 1
        prefix = _common_prefix([trajectories[i] for i in indices]) if cut else 0
        if longest_prefix is not None:
            prefix = min(prefix, longest_prefix)
        sizes = [(i, computed_tokens(trajectories[i]) - prefix, int(trajectories[i].mask.sum())) for i in indices]
        if prefix or longest_prefix is not None:
            found.append(Family(prefix, tuple(Member(*size) for size in sizes)))
        else:
            found += [Family(0, (Member(*size),)) for size in sizes]
    return found


def rows_needed(trajectories: Sequence[Trajectory], config: PackingConfig) -> int:
    """How many rows `pack` makes of them. Raises ValueError where one does not fit a row."""
    return len(_planned(trajectories, config))


def _planned(trajectories: Sequence[Trajectory], config: PackingConfig) -> list[list[Family]]:
    room = config.row_tokens, config.row_targets
    if config.row_shape is None:
        return plan_rows(families(trajectories, config.share_prefixes), *room)
    found = families(trajectories, config.share_prefixes, config.row_shape.prefix)
    return plan_fixed_rows(found, *room, config.row_shape)


def pack(trajectories: Sequence[Trajectory], config: PackingConfig) -> PackedBatch:
    """Lay trajectories out in rows. Raises ValueError where one does not fit, or all together exceed the capacity."""
    for i, trajectory in enumerate(trajectories):
        _check(i, trajectory, config)
    rows = _planned(trajectories, config)
    if len(rows) > config.capacity * config.rows:
        raise ValueError(
            f"{len(trajectories)} trajectories need {len(rows)} rows; the batch has at most "
            f"{config.capacity} micro-batches of {config.rows}. Raise the capacity or pack fewer."
        )
    if config.balance_experts:
        # A micro-batch that is not full has empty rows, which may change places too.
        rows = [*rows, *([] for _ in range(-len(rows) % config.rows))]
        rows = [rows[i] for i in balanced(expert_loads(rows, trajectories), config.rows)]
    batch = _empty(
        config,
        count=max(-(-len(rows) // config.rows), 1),
        num_sequences=sum(bool(t.mask.any()) for t in trajectories),
        unshared_tokens=sum(computed_tokens(t) for t in trajectories),
    )
    for r, row in enumerate(rows):
        _fill(batch, divmod(r, config.rows), row, trajectories)
    return batch


def expert_loads(rows: Sequence[Sequence[Family]], trajectories: Sequence[Trajectory]) -> np.ndarray:
    """float64 [rows, layers of experts, E]: recorded choices of the tokens of each row, of what they are known of."""
    known = [t.routes for t in trajectories if t.routes is not None]
    layers, experts = (known[0].shape[1], 1 + max(int(r.max()) for r in known)) if known else (1, 1)
    loads = np.zeros((len(rows), layers, max(experts, 1)))
    for row, load in zip(rows, loads, strict=True):
        for family in row:
            parts = [(family.members[0], slice(family.prefix))]
            parts += [(m, slice(family.prefix, family.prefix + m.tokens)) for m in family.members]
            for member, part in parts:
                routes = trajectories[member.number].routes
                for layer in range(layers if routes is not None else 0):
                    chosen = routes[part, layer]  # type: ignore[index]
                    load[layer] += np.bincount(chosen[chosen >= 0], minlength=load.shape[1])
    return loads


def _common_prefix(trajectories: Sequence[Trajectory]) -> int:
    """Leading tokens that all have in common and none trains on."""
    most = min(int(np.argmax(t.mask)) for t in trajectories)
    first = trajectories[0].tokens[:most]
    differs = np.any([t.tokens[:most] != first for t in trajectories], axis=0)
    return int(np.argmax(differs)) if differs.any() else most


def _check(i: int, trajectory: Trajectory, config: PackingConfig) -> None:
    if len(trajectory.mask) and trajectory.mask[0]:
        raise ValueError(f"trajectory {i}: its first token is masked in, but nothing precedes it to predict it")
    wanted = (int(trajectory.mask.sum()), config.head_size)
    if config.head_size and (trajectory.head is None or trajectory.head.ids.shape != wanted):
        have = "no head" if trajectory.head is None else f"a head of {list(trajectory.head.ids.shape)}"
        raise ValueError(f"trajectory {i}: {have}; {list(wanted)} expected, candidates for each masked token")


def _empty(config: PackingConfig, count: int, num_sequences: int, unshared_tokens: int) -> PackedBatch:
    inputs = (count, config.rows, config.row_tokens)
    targets = (count, config.rows, config.row_targets)
    head = (*targets, config.head_size)
    return PackedBatch(
        tokens=np.zeros(inputs, np.int32),
        positions=np.zeros(inputs, np.int32),
        segment_ids=np.zeros(inputs, np.int32),
        prefix_ids=np.zeros(inputs, np.int32),
        source=np.zeros(targets, np.int32),
        target_tokens=np.zeros(targets, np.int32),
        mask=np.zeros(targets, bool),
        sequences=np.zeros(targets, np.int32),
        lengths=np.zeros(targets, np.int32),
        advantages=np.zeros(targets, np.float32),
        sampler_logprobs=np.zeros(targets, np.float32),
        ages=np.zeros(targets, np.int32),
        head_ids=np.zeros(head, np.int32) if config.head_size else None,
        head_logprobs=np.zeros(head, np.float32) if config.head_size else None,
        routes=None if config.routes is None else np.full((*inputs, *config.routes), -1, np.int32),
        num_sequences=num_sequences,
        unshared_tokens=unshared_tokens,
        frozen={
            f.name: np.zeros((*targets, f.candidates) if f.candidates else targets, f.dtype) for f in config.frozen
        },
        row_shape=config.row_shape,
    )


def _fill(batch: PackedBatch, at: tuple[int, int], row: Sequence[Family], trajectories: Sequence[Trajectory]) -> None:
    """Write the families of one row, each the beginning it shares and then what its members have of their own."""
    segment = start = written = 0
    row_shape, room = batch.row_shape, batch.row_shape.own_tokens(batch.tokens.shape[2]) if batch.row_shape else 0
    for family in row:
        shared, prefix_segment = start, 0
        if family.prefix:
            segment = prefix_segment = segment + 1
            first = trajectories[family.members[0].number]
            start = _put_tokens(batch, at, start, first, slice(family.prefix), segment, 0)
        for number, member in enumerate(family.members):
            start = row_shape.prefix + number * room if row_shape else start
            trajectory, segment = trajectories[member.number], segment + 1
            own = slice(family.prefix, family.prefix + member.tokens)
            targets = slice(written, written + member.targets)
            # Both parts of a sequence are predicted from where they lie.
            before = np.flatnonzero(trajectory.mask) - 1
            offset = np.where(before < family.prefix, shared, start - family.prefix)
            _put_targets(batch, (*at, targets), member.number, trajectory, offset + before)
            start = _put_tokens(batch, at, start, trajectory, own, segment, prefix_segment)
            written += member.targets


def _put_tokens(
    batch: PackedBatch, at: tuple[int, int], start: int, trajectory: Trajectory, part: slice, segment: int, prefix: int
) -> int:
    """Write one segment, a part of a sequence; returns where the next may begin."""
    tokens = trajectory.tokens[part]
    span = (*at, slice(start, start + len(tokens)))
    batch.tokens[span] = tokens
    batch.positions[span] = (part.start or 0) + np.arange(len(tokens))
    batch.segment_ids[span] = segment
    batch.prefix_ids[span] = prefix
    if batch.routes is not None and trajectory.routes is not None:
        batch.routes[span] = trajectory.routes[part]
    return start + len(tokens)


def _put_targets(
    batch: PackedBatch, span: tuple[int, int, slice], i: int, trajectory: Trajectory, source: np.ndarray
) -> None:
    chosen = np.flatnonzero(trajectory.mask)
    batch.source[span] = source
    batch.target_tokens[span] = trajectory.tokens[chosen]
    batch.mask[span] = True
    batch.sequences[span] = i + 1
    batch.lengths[span] = len(chosen)
    batch.advantages[span] = trajectory.advantage
    batch.sampler_logprobs[span] = trajectory.logprobs[chosen]
    batch.ages[span] = trajectory.ages[chosen]
    if batch.head_ids is not None and batch.head_logprobs is not None and trajectory.head is not None:
        batch.head_ids[span] = trajectory.head.ids
        batch.head_logprobs[span] = trajectory.head.logprobs
    for name, array in batch.frozen.items():
        array[span] = trajectory.frozen[name]
