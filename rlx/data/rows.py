"""Which sequences share a row: first-fit decreasing over families, which are split where that saves a row. Pure Python.

A family is a number of sequences with a beginning in common. In each row that holds any of them the beginning is laid
out once, so members in one row cost less together than apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rlx.types import RowShape


class Member(NamedTuple):
    """One sequence of a family."""

    number: int  # of the trajectory
    tokens: int  # behind the common beginning
    targets: int


class Family(NamedTuple):
    """Sequences with `prefix` leading tokens in common, 0 = none; all of them, or those in one row."""

    prefix: int
    members: tuple[Member, ...]

    @property
    def tokens(self) -> int:
        return self.prefix + sum(m.tokens for m in self.members)

    @property
    def targets(self) -> int:
        return sum(m.targets for m in self.members)


@dataclasses.dataclass
class _Row:
    tokens: int  # free
    targets: int  # free
    parts: dict[int, Family] = dataclasses.field(default_factory=dict)  # by the family's place among those given

    def put(self, name: int, part: Family) -> None:
        self.tokens -= part.tokens
        self.targets -= part.targets
        self.parts[name] = part

    def holds(self, part: Family) -> bool:
        return part.tokens <= self.tokens and part.targets <= self.targets

    def share(self, family: Family) -> Family:
        """Those members that the free room takes, each tried in turn; perhaps none."""
        chosen = Family(family.prefix, ())
        for member in family.members:
            more = Family(family.prefix, (*chosen.members, member))
            chosen = more if self.holds(more) else chosen
        return chosen


def plan_rows(families: Sequence[Family], row_tokens: int, row_targets: int) -> list[list[Family]]:
    """The families of each row, split where needed. Equal sizes keep their order.

    The largest family goes first, each into the first row with room for it; one that is larger than a row is cut into
    parts that fill rows. Then rows are dissolved into the gaps of the others, the emptiest first.

    Raises ValueError for a sequence that no row can hold.
    """
    rows: list[_Row] = []
    for name in sorted(range(len(families)), key=lambda i: -families[i].tokens):
        members = sorted(families[name].members, key=lambda m: -m.tokens)
        rest = Family(families[name].prefix, tuple(members))
        while rest.members:
            new = _Row(row_tokens, row_targets)
            part = new.share(rest)
            if not part.members:
                raise ValueError(_too_large(rest, row_tokens, row_targets))
            row = next((r for r in rows if r.holds(part)), new)
            if row is new:
                rows.append(new)
            row.put(name, part)
            rest = _without(rest, part)
    fewest = _fewest(families, row_tokens, row_targets)
    while len(rows) > fewest and (fewer := _dissolved(rows)):
        rows = fewer
    return [list(row.parts.values()) for row in rows]


def plan_fixed_rows(
    families: Sequence[Family], row_tokens: int, row_targets: int, row_shape: RowShape
) -> list[list[Family]]:
    """The same where the parts of a row lie at fixed places: one family a row, or some of its members.

    Raises ValueError for a sequence that no row can hold.
    """
    room, rows = row_shape.own_tokens(row_tokens), []
    for family in families:
        part = Family(family.prefix, ())
        for member in family.members:
            if family.prefix > row_shape.prefix or member.tokens > room or member.targets > row_targets:
                raise ValueError(_too_large_for_its_place(family.prefix, member, row_shape.prefix, room, row_targets))
            if len(part.members) == row_shape.samples or part.targets + member.targets > row_targets:
                rows.append([part])
                part = Family(family.prefix, ())
            part = Family(family.prefix, (*part.members, member))
        rows.append([part])
    return rows


def _fewest(families: Sequence[Family], row_tokens: int, row_targets: int) -> int:
    """Rows that cannot be done without, however well they are filled."""
    tokens, targets = sum(f.tokens for f in families), sum(f.targets for f in families)
    return max(1, -(-tokens // row_tokens), -(-targets // row_targets))


def _dissolved(rows: Sequence[_Row]) -> list[_Row] | None:
    """The rows without one of them, the emptiest that can be spread over the gaps of the others; None if none can."""
    for row in sorted(rows, key=lambda r: -r.tokens):
        others = [dataclasses.replace(r, parts=dict(r.parts)) for r in rows if r is not row]
        if all(_spread(name, part, others) for name, part in row.parts.items()):
            return others
    return None


def _spread(name: int, rest: Family, rows: Sequence[_Row]) -> bool:
    """Put a family into the gaps of the rows, the largest first; False if they do not take all of it."""
    for row in sorted(rows, key=lambda r: -r.tokens):
        part = row.share(rest)
        if part.members and name not in row.parts:
            row.put(name, part)
            rest = _without(rest, part)
    return not rest.members


def _without(family: Family, part: Family) -> Family:
    return Family(family.prefix, tuple(m for m in family.members if m not in part.members))


def _too_large(family: Family, row_tokens: int, row_targets: int) -> str:
    member = family.members[0]
    return (
        f"trajectory {member.number}: {family.prefix + member.tokens} tokens are computed for its {member.targets} "
        f"targets; a row holds {row_tokens} and {row_targets}. Raise learner.row_tokens or learner.row_targets, or "
        "shorten the samples."
    )


def _too_large_for_its_place(prefix: int, member: Member, room: int, own: int, row_targets: int) -> str:
    return (
        f"trajectory {member.number}: {prefix} tokens that it may share, {member.tokens} of its own and "
        f"{member.targets} targets; a row holds {room} (learner.row_prefix), {own} for each of its samples "
        f"(learner.row_tokens, learner.row_samples) and {row_targets} (learner.row_targets). Raise these, or set "
        "learner.row_samples to 0."
    )
