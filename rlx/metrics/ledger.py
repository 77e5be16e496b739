"""The token ledger: every sampled token ends in exactly one bin, and the sum is checked at every step.

Tokens enter by `generated` (into `in_flight`, or `evaluated` for an evaluation's) and travel by `move`. A bin other
than `in_flight` and `buffered` is final: what is in it never leaves. The same is counted for samples and groups.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

BINS: Mapping[str, str] = {
    "trained": "in the loss of an update that was applied",
    "stale": "discarded: older than the largest policy lag",
    "no_signal": "discarded: rewards of the group all equal",
    "too_long": "discarded: beyond the longest sample that is trained",
    "masked": "kept out of the loss by the rule for truncated responses",
    "aborted": "cancelled before an end was reached",
    "failed": "lost to a failure, by reason",
    "lost": "sampled after the checkpoint that the run resumed from",
    "in_flight": "sampled, not yet a graded group",
    "buffered": "in a graded group that waits for an update",
    "evaluated": "sampled by an evaluation",
}
OPEN_BINS = ("in_flight", "buffered")
UNITS = ("tokens", "samples", "groups")


class LedgerError(ValueError):
    """A move that the books do not allow, or books that do not balance."""


class Count(NamedTuple):
    tokens: int = 0
    samples: int = 0
    groups: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other)))

    def minus(self, other: Count) -> Count:
        return Count(*(a - b for a, b in zip(self, other)))


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

    @property
    def total(self) -> Count:
        """Everything that was generated."""
        return self._generated

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

    def move(self, source: str, target: str, tokens: int, samples: int = 0, groups: int = 0) -> None:
        """Moves counts from an open bin to another one.

        Raises:
          LedgerError: where a bin is unknown or `source` is final, `source` holds less than is moved, tokens would
            be trained without having been buffered, or buffered ones would be in flight again.
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
        self._bins[source] = left
        self._bins[target] = self[target].plus(count)

    def book_lost(self, last_written: Mapping[str, Any]) -> Count:
        """After a resume: books as `lost` what the dead process had generated beyond this ledger's checkpoint.

        Args:
          last_written: the newest state on disk (`get_state` of the process that died).
        Raises:
          LedgerError: where that state is older than this ledger.
        """
        beyond = Count(*last_written["generated"]).minus(self._generated)
        if min(beyond) < 0:
            raise LedgerError(
                f"the ledger on disk is older than the checkpoint: it lacks {Count(*(-n for n in beyond))}"
            )
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
        return {"generated": list(self._generated), "bins": {name: list(count) for name, count in self._bins.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `get_state` returned.

        Raises:
          LedgerError: where it names an unknown bin or does not balance; the ledger is then unchanged.
        """
        restored = Ledger()
        restored._generated = Count(*state["generated"])
        restored._bins = {name: Count(*count) for name, count in state["bins"].items()}
        for name in restored._bins:
            _check_bin(name)
        restored.check()
        self._generated, self._bins = restored._generated, restored._bins

    def scalars(self) -> dict[str, float]:
        """Metrics of the group `ledger/`; `trained_share` only once a token has reached an end."""
        values: dict[str, float] = {}
        for index, unit in enumerate(UNITS):
            values[f"ledger/{unit}_generated"] = float(self._generated[index])
            values |= {f"ledger/{unit}_{name}": float(self[name][index]) for name in BINS}
            reasons = [name for name in sorted(self._bins) if name.startswith("failed/")]
            values |= {f"ledger/{unit}_{name.replace('/', '_')}": float(self[name][index]) for name in reasons}
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

    def _enter(self, name: str, count: Count) -> None:
        self._generated = self._generated.plus(count)
        self._bins[name] = self[name].plus(count)


def _sum(counts: Iterable[Count]) -> Count:
    total = Count()
    for count in counts:
        total = total.plus(count)
    return total
