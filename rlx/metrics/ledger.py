"""The token ledger: every sampled token ends in exactly one bin, and the sum is checked at every step.

Tokens enter by `generated` (into `in_flight`, or `evaluated` for an evaluation's) and travel by `move`. A bin other
than `in_flight` and `buffered` is final: what is in it never leaves. The same is counted for samples and groups, and in
the final bins tokens by their age and samples by their length, as far as whoever moved them said.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlx.types import AGE_BINS, LENGTH_BINS, Count, bin_labels

BINS: Mapping[str, str] = {
    "trained": "in the loss of an update that was applied",
    "stale": "discarded: older than the largest policy lag",
    "no_signal": "discarded: rewards of the group all equal",
    "too_long": "discarded: beyond the longest sample that is trained",
    "masked": "kept out of the loss by the rule for truncated responses",
    "aborted": "cancelled before an end was reached",
    "failed": "lost to a failure, by reason",
    "lost": "in neither the checkpoint nor the journal that the run resumed from",
    "in_flight": "sampled, not yet a graded group",
    "buffered": "in a graded group that waits for an update",
    "evaluated": "sampled by an evaluation",
}
OPEN_BINS = ("in_flight", "buffered")
UNITS = ("tokens", "samples", "groups")


class LedgerError(ValueError):
    """A move that the books do not allow, or books that do not balance."""


def failed(reason: str) -> str:
    """The bin of one kind of failure, for instance `failed("grader_timeout")`: a sub-bin of `failed`."""
    if not reason or "/" in reason:
        raise LedgerError(f"the reason of a failure must be a short name without '/', got {reason!r}")
    return f"failed/{reason}"


def _check_bin(name: str) -> None:
    if name == "failed":
        raise LedgerError("a failure needs a reason: use failed('grader_timeout') or the like as the bin")
    if name not in BINS and not (name.startswith("failed/") and len(name) > len("failed/")):
        near = difflib.get_close_matches(name, BINS, n=1, cutoff=0.0)[0]
        raise LedgerError(f"the ledger has no bin {name!r}; the nearest is {near!r}, all are {', '.join(BINS)}")


def _count(tokens: int, samples: int, groups: int) -> Count:
    count = Count(int(tokens), int(samples), int(groups))
    if min(count) < 0 or count != (tokens, samples, groups):
        raise LedgerError(f"tokens, samples and groups are whole numbers >= 0, got {(tokens, samples, groups)}")
    return count


class Ledger:
    """Counts since the run began. Not thread-safe: one owner books."""

    def __init__(self) -> None:
        self._generated = Count()
        self._bins: dict[str, Count] = {}
        self._ages: dict[str, list[int]] = {}  # tokens by AGE_BINS
        self._lengths: dict[str, list[int]] = {}  # samples by LENGTH_BINS
        self._ended: dict[str, Count] = {}  # by what ended them

    @property
    def total(self) -> Count:
        """Everything that was generated."""
        return self._generated

    @property
    def ended(self) -> Mapping[str, Count]:
        """Tokens and samples of the graded groups by what ended them: a `StopReason`, such as "session_limit"."""
        return dict(self._ended)

    def __getitem__(self, name: str) -> Count:
        """What a bin holds; `failed` holds the sum of its reasons."""
        if name == "failed":
            return _sum(count for key, count in self._bins.items() if key.startswith("failed/"))
        _check_bin(name)
        return self._bins.get(name, Count())

    def generated(self, tokens: int, samples: int = 0, groups: int = 0, into: str = "in_flight") -> None:
        """Books what an engine sampled. `into` is "in_flight", or "evaluated" for an evaluation.

        Raises:
          LedgerError: for a negative or fractional number, or another bin.
        """
        if into not in ("in_flight", "evaluated"):
            raise LedgerError(f"sampled tokens enter 'in_flight' or 'evaluated', not {into!r}; move them from there")
        self._enter(into, _count(tokens, samples, groups))

    def move(
        self,
        source: str,
        target: str,
        tokens: int,
        samples: int = 0,
        groups: int = 0,
        *,
        ages: Mapping[int, int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Moves counts from an open bin to another one.

        Args:
          ages: the tokens by their age in updates. lengths: written tokens of each sample. None: not said.
        Raises:
          LedgerError: where a bin is unknown or `source` is final, `source` holds less than is moved, tokens would
            be trained without having been buffered, or buffered ones would be in flight again; where ages or lengths
            do not add up to what is moved.
        """
        _check_bin(source)
        _check_bin(target)
        count = _count(tokens, samples, groups)
        if source not in OPEN_BINS:
            raise LedgerError(f"{source!r} is final: nothing leaves it (asked to move {count} to {target!r})")
        if target in (source, "in_flight", "evaluated") or (source, target) == ("in_flight", "trained"):
            raise LedgerError(
                f"no move leads from {source!r} to {target!r}: the way is in_flight, buffered, a final bin"
            )
        left = self[source].minus(count)
        if min(left) < 0:
            raise LedgerError(
                f"{source!r} holds {self[source]}, too little to move {count} to {target!r}\n{self.table()}"
            )
        if (ages is not None and sum(ages.values()) != count.tokens) or (
            lengths is not None and len(lengths) != count.samples
        ):
            raise LedgerError(f"ages {ages} and lengths {lengths} are not those of {count}")
        self._bins[source] = left
        self._bins[target] = self[target].plus(count)
        if target not in OPEN_BINS:
            _add(self._ages, target, AGE_BINS, (ages or {}).items())
            _add(self._lengths, target, LENGTH_BINS, ((length, 1) for length in lengths or ()))

    def book_end(self, reason: str, tokens: int, samples: int) -> None:
        """Books what ended samples, beside the bin that they are in. Raises LedgerError for a number that is none."""
        self._ended[reason] = self._ended.get(reason, Count()).plus(_count(tokens, samples, 0))

    def book_lost(self, *known: Count) -> Count:
        """After a resume: books as `lost` what the dead process had generated beyond what this ledger has.

        Args:
          known: `total` of the dead process, as its files tell: the ledger on disk, the last entry of the journal.
        Raises:
          LedgerError: where all of them are older than this ledger.
        """
        newest = Count(*(max(numbers) for numbers in zip(*known)))
        beyond = newest.minus(self._generated)
        if min(beyond) < 0:
            lacks = Count(*(-n for n in beyond))
            raise LedgerError(f"the ledger on disk is older than the checkpoint: it lacks {lacks}")
        self._enter("lost", beyond)
        return beyond

    def check(self, holdings: Mapping[str, Count] | None = None) -> None:
        """Checks that generated = the sum of the bins, and that open bins hold what their owners say they hold.

        Args:
          holdings: counts by bin as their owners (the buffer, the engines) count them; other bins are not compared.
        Raises:
          LedgerError: with the table.
        """
        booked = _sum(self._bins.values())
        if booked != self._generated or any(min(count) < 0 for count in self._bins.values()):
            raise LedgerError(f"generated {self._generated} but the bins hold {booked}\n{self.table()}")
        for name, held in (holdings or {}).items():
            if self[name] != held:
                raise LedgerError(f"{name!r} is booked as {self[name]} but holds {held}\n{self.table()}")

    def get_state(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "generated": list(self._generated),
            "bins": {name: list(count) for name, count in self._bins.items()},
            "tokens_by_age": {name: list(row) for name, row in self._ages.items()},
            "samples_by_length": {name: list(row) for name, row in self._lengths.items()},
            "ended": {reason: list(count) for reason, count in self._ended.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `get_state` returned.

        Raises:
          LedgerError: where it names an unknown bin or does not balance; the ledger is then unchanged.
        """
        restored = Ledger()
        restored._generated = Count(*state["generated"])
        restored._bins = {name: Count(*count) for name, count in state["bins"].items()}
        # A ledger written before ages and lengths were counted has none.
        restored._ages = {name: list(row) for name, row in state.get("tokens_by_age", {}).items()}
        restored._lengths = {name: list(row) for name, row in state.get("samples_by_length", {}).items()}
        restored._ended = {reason: Count(*count) for reason, count in state.get("ended", {}).items()}
        for name in (*restored._bins, *restored._ages, *restored._lengths):
            _check_bin(name)
        restored.check()
        self._generated, self._bins = restored._generated, restored._bins
        self._ages, self._lengths, self._ended = restored._ages, restored._lengths, restored._ended

    def scalars(self) -> dict[str, float]:
        """Metrics of the group `ledger/`; `trained_share` only once a token has reached an end."""
        values: dict[str, float] = {}
        for index, unit in enumerate(UNITS):
            values[f"ledger/{unit}_generated"] = float(self._generated[index])
            values |= {f"ledger/{unit}_{name}": float(self[name][index]) for name in BINS}
            reasons = [name for name in sorted(self._bins) if name.startswith("failed/")]
            values |= {f"ledger/{unit}_{name.replace('/', '_')}": float(self[name][index]) for name in reasons}
        for kind, table, edges in (("tokens", self._ages, AGE_BINS), ("samples", self._lengths, LENGTH_BINS)):
            what = "age" if kind == "tokens" else "length"
            for name, row in _by_bin(table).items():
                found = zip(bin_labels(edges), row)
                values |= {f"ledger/{kind}_{name}_{what}_{label}": float(n) for label, n in found if n}
        for reason, count in self._ended.items():
            values |= {f"ledger/{unit}_ended_{reason}": float(count[i]) for i, unit in enumerate(("tokens", "samples"))}
        ended = self._generated.tokens - sum(self[name].tokens for name in (*OPEN_BINS, "evaluated"))
        if ended:
            values["ledger/trained_share"] = self["trained"].tokens / ended
        return values

    def table(self) -> str:
        """Markdown: a row for each bin (failures by reason), then the sum of the bins and what was generated."""
        reasons = [name for name in sorted(self._bins) if name.startswith("failed/")]
        names = [key for name in BINS for key in (reasons or [name] if name == "failed" else [name])]
        held = [(name, self[name]) for name in names]
        rows = [*held, ("sum of the bins", _sum(count for _, count in held)), ("generated", self._generated)]
        lines = ["| bin | tokens | share | samples | groups |", "|:--|--:|--:|--:|--:|"]
        for name, count in rows:
            share = count.tokens / self._generated.tokens if self._generated.tokens else 0.0
            lines.append(f"| {name} | {count.tokens:,} | {share:.1%} | {count.samples:,} | {count.groups:,} |")
        return "\n".join(lines)

    def profile(self) -> str:
        """Markdown: tokens of final bins by age, samples by length and by what ended them, as far as it was said."""
        parts = []
        if self._ended:
            rows = [f"| {reason} | {c.tokens:,} | {c.samples:,} |" for reason, c in sorted(self._ended.items())]
            parts += ["| ended by | tokens | samples |", "|:--|--:|--:|", *rows, ""]
        for title, table, edges in (
            ("tokens by age in updates", self._ages, AGE_BINS),
            ("samples by written tokens", self._lengths, LENGTH_BINS),
        ):
            if table:
                labels = bin_labels(edges)
                rows = [f"| {name} | {' | '.join(f'{n:,}' for n in row)} |" for name, row in sorted(table.items())]
                parts += [f"| {title} | {' | '.join(labels)} |", f"|:--|{'--:|' * len(labels)}", *rows, ""]
        return "\n".join(parts)

    def _enter(self, name: str, count: Count) -> None:
        self._generated = self._generated.plus(count)
        self._bins[name] = self[name].plus(count)


def _sum(counts: Iterable[Count]) -> Count:
    total = Count()
    for count in counts:
        total = total.plus(count)
    return total


def _add(table: dict[str, list[int]], name: str, edges: tuple[int, ...], values: Iterable[tuple[int, int]]) -> None:
    for value, times in values:
        row = table.setdefault(name, [0] * len(edges))
        row[max(0, bisect.bisect_right(edges, value) - 1)] += times


def _by_bin(table: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The rows with those of all failures as one."""
    rows: dict[str, list[int]] = {}
    for name, row in table.items():
        name = name.partition("/")[0]
        rows[name] = [a + b for a, b in zip(rows.get(name, [0] * len(row)), row)]
    return rows
