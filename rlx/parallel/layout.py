"""Layouts as the field writes them: `TP4 PP3 CP2 DP1 EP8`, how many devices each kind of parallelism spans.

Tensor, pipeline, context and data parallelism are the mesh's axes; their product is the number of devices. Experts have
no axis of their own: EP is a view of some of the others, the experts of a layer being spread over all devices of these.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Literal, get_args

Axis = Literal["pp", "dp", "cp", "tp"]

# Slow links to fast ones: neighbours on the last axis are neighbours on the machine.
AXES: tuple[Axis, ...] = get_args(Axis)
# What EP may span, the axes that talk most among themselves first.
EXPERT_VIEWS: tuple[tuple[Axis, ...], ...] = (
    (),
    ("tp",),
    ("cp",),
    ("dp",),
    ("cp", "tp"),
    ("dp", "tp"),
    ("dp", "cp"),
    ("dp", "cp", "tp"),
)
_WORD = re.compile(r"(tp|pp|cp|dp|ep)\s*=?\s*(\d+)", re.IGNORECASE)
SUGGESTIONS = 3


class LayoutError(ValueError):
    """A layout that cannot be; the message names the numbers and layouts that could."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many devices each kind of parallelism spans."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_axes(self) -> tuple[Axis, ...]:
        """The axes that experts are spread over: the first view whose devices are `ep`.

        Raises:
          LayoutError: where no whole axes multiply to `ep`.
        """
        for view in EXPERT_VIEWS:
            if math.prod(self.size(axis) for axis in view) == self.ep:
                return view
        possible = sorted({math.prod(self.size(axis) for axis in view) for view in EXPERT_VIEWS})
        raise LayoutError(
            f"EP{self.ep} is no product of whole axes of TP{self.tp} CP{self.cp} DP{self.dp}: experts are spread over "
            f"a view of the mesh, here EP may be {', '.join(map(str, possible))}"
        )

    def size(self, axis: Axis) -> int:
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} CP{self.cp} DP{self.dp} EP{self.ep}"


def parse_layout(text: str) -> Layout:
    """`TP4 PP3 CP2 DP1 EP8` or `tp4,pp3`, in any order; what is not named is 1.

    Raises:
      LayoutError: where a word is not known, comes twice, or is below 1, or where EP is no view of the others.
    """
    sizes: dict[str, int] = {}
    for word in (part for part in re.split(r"[,\s]+", text.strip()) if part):
        match = _WORD.fullmatch(word)
        if match is None:
            raise LayoutError(
                f"layout {text!r}: {word!r} is none of TPn, PPn, CPn, DPn, EPn, as in 'TP4 PP3 CP2 DP1 EP8'"
            )
        name, size = match[1].lower(), int(match[2])
        if name in sizes:
            raise LayoutError(f"layout {text!r} names {name.upper()} twice: {sizes[name]} and {size}")
        if size < 1:
            raise LayoutError(f"layout {text!r}: {name.upper()} is {size}; it is a number of devices, at least 1")
        sizes[name] = size
    if not sizes:
        raise LayoutError("the layout is empty; TP1 is one device")
    layout = Layout(**sizes)
    _ = layout.expert_axes
    return layout


@dataclasses.dataclass(frozen=True)
class Divisible:
    """Sizes of a model and a batch that a layout must divide. 0 = there is none.

    Attributes:
      kv_heads: key-value heads; fewer than TP are held whole by every device of the axis.
      recurrent_heads: of linear attention, held whole where TP does not divide them.
      periods: repeats of the layer pattern that stages are made of; those that are missing for whole stages are padded.
      rounds: blocks of layers that each stage of a pipeline is to hold, which is no size but must fit them too.
      ring: keys and values are to go round cp, which is no size either but needs a ring.
      fixed_parts: the parts of a row lie at fixed places, which leaves nothing for cp to cut.
      sequence_parallel: between products the tokens of a row are cut over tp too (`rlx.parallel.sequence`).
    """

    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    periods: int
    experts: int = 0
    recurrent_heads: int = 0
    row_tokens: int = 0
    rows: int = 0
    rounds: int = 1
    ring: bool = False
    fixed_parts: bool = False
    sequence_parallel: bool = False


def unsupported_reason(layout: Layout, sizes: Divisible) -> str | None:
    """Why a model and a batch of these sizes cannot be laid out so, None if they can."""
    split_over_tp = (("attention heads", sizes.heads), ("MLP width", sizes.mlp), ("vocabulary", sizes.vocab))
    for name, size in split_over_tp:
        if size % layout.tp:
            return f"TP{layout.tp} does not divide {name}, {size}"
    if sizes.kv_heads % layout.tp and layout.tp % sizes.kv_heads:
        return f"TP{layout.tp} and the {sizes.kv_heads} key-value heads: neither divides the other"
    if layout.ep > 1 and not sizes.experts:
        return f"EP{layout.ep} for a model without experts"
    if sizes.experts % layout.ep:
        return f"EP{layout.ep} does not divide the {sizes.experts} experts of a layer"
    if layout.pp > sizes.periods:
        return f"PP{layout.pp} for {sizes.periods} repeats of the layer pattern: a stage would be empty"
    if sizes.rounds > 1 and (reason := _circular_reason(layout, sizes)):
        return reason
    if sizes.ring and layout.cp == 1:
        return (
            "cluster.context_parallel = 'ring' with CP1, which leaves a row's tokens on one device: set it to 'gather'"
        )
    if sizes.fixed_parts and layout.cp > 1:
        return f"CP{layout.cp} cuts rows whose parts have places (learner.row_samples): set that to 0"
    if sizes.row_tokens % (parts := row_parts(layout)):
        return (
            f"CP{layout.cp} cuts rows into {parts} parts, which do not divide {sizes.row_tokens} tokens; "
            f"learner.row_tokens = {_up(sizes.row_tokens, parts)} would do"
        )
    if sizes.row_tokens % (parts := row_parts(layout, sizes.sequence_parallel)):
        return (
            f"TP{layout.tp} CP{layout.cp} with cluster.sequence_parallel cut rows into {parts} parts, which do not "
            f"divide {sizes.row_tokens} tokens; learner.row_tokens = {_up(sizes.row_tokens, parts)} would do, or "
            "cluster.sequence_parallel = False"
        )
    if sizes.rows % layout.dp:
        return (
            f"DP{layout.dp} does not divide the {sizes.rows} rows of a micro-batch; "
            f"learner.micro_batch_rows = {_up(sizes.rows, layout.dp)} would do"
        )
    return None


def _circular_reason(layout: Layout, sizes: Divisible) -> str | None:
    asked, rounds = f"cluster.pipeline_rounds = {sizes.rounds}", sizes.rounds
    if layout.pp == 1:
        return f"{asked} without a pipeline, PP1: set it to 1"
    if empty := empty_blocks(sizes.periods, layout.pp * rounds):
        fitting = [v for v in range(1, sizes.periods // layout.pp + 1) if rounds_of(sizes.periods, layout, v) == v]
        return (
            f"{asked} makes {layout.pp * rounds} blocks of {sizes.periods} repeats of the layer pattern for "
            f"PP{layout.pp}, {empty} of them empty; set it to {min(fitting, key=lambda v: abs(v - rounds))}"
        )
    if sizes.rows % (layout.dp * layout.pp):
        parts = sizes.rows / layout.dp
        return (
            f"{asked}: {parts:g} rows of a micro-batch on each of DP{layout.dp} are not in groups of PP{layout.pp}, "
            f"which go round together; learner.micro_batch_rows = {_up(sizes.rows, layout.dp * layout.pp)} would do"
        )
    return None


def row_parts(layout: Layout, sequence_parallel: bool = False) -> int:
    """Equal parts that the tokens of a row are cut into. Zig-zag order gives every rank an early and a late one."""
    parts = 2 * layout.cp if layout.cp > 1 else 1
    return math.lcm(parts, layout.cp * layout.tp) if sequence_parallel else parts


def _up(number: int, factor: int) -> int:
    """The next multiple."""
    return -(-number // factor) * factor


def micro_batches(layout: Layout, rows: int) -> int:
    """Parts that a pipeline cuts `rows` into: as small as dp allows, which makes its bubble as small as can be."""
    return max(rows // layout.dp, 1) if layout.pp > 1 else 1


def empty_blocks(repeats: int, blocks: int) -> int:
    """Of so many equal blocks, the last that get none of the repeats: each would be computed all the same."""
    return blocks - math.ceil(repeats / math.ceil(repeats / blocks))


def rounds_of(repeats: int, layout: Layout, rounds: int) -> int:
    """Blocks that a stage holds of a group of layers: as many as asked for where all blocks get a repeat, else 1."""
    return 1 if empty_blocks(repeats, layout.pp * rounds) else rounds


def ticks(layout: Layout, parts: int, rounds: int = 1) -> int:
    """Steps of a pipeline, in each of which a stage does one of v blocks for one of M micro-batches: v M + S - 1."""
    return rounds * parts + layout.pp - 1


def check(layout: Layout, sizes: Divisible) -> None:
    """Refuses a layout that the sizes do not allow.

    Raises:
      LayoutError: naming the numbers and the nearest layouts of as many devices that would work.
    """
    reason = unsupported_reason(layout, sizes)
    if reason is None:
        return
    near = nearest(layout, sizes)
    instead = (
        f"layouts of {layout.devices} devices that work: {'; '.join(map(str, near))}"
        if near
        else (f"no layout of {layout.devices} devices works for it; take another number of devices")
    )
    raise LayoutError(f"{layout}: {reason}; {instead}")


def nearest(layout: Layout, sizes: Divisible, count: int = SUGGESTIONS) -> list[Layout]:
    """The layouts of as many devices that work, those first that change the fewest factors of two."""
    works = [other for other in _same_devices(layout, sizes) if unsupported_reason(other, sizes) is None]
    return sorted(works, key=lambda other: (_distance(layout, other), str(other)))[:count]


def _same_devices(layout: Layout, sizes: Divisible) -> list[Layout]:
    divisors = [n for n in range(1, layout.devices + 1) if layout.devices % n == 0]
    found = []
    for tp, pp, cp in itertools.product(divisors, repeat=3):
        dp, rest = divmod(layout.devices, tp * pp * cp)
        if rest:
            continue
        plain = Layout(tp, pp, cp, dp)
        spans = {math.prod(plain.size(axis) for axis in view) for view in EXPERT_VIEWS} if sizes.experts else {1}
        found += [dataclasses.replace(plain, ep=ep) for ep in spans]
    return found


def _distance(a: Layout, b: Layout) -> float:
    return sum(abs(math.log2(x / y)) for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True))
