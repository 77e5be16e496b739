"""The choice of an implementation: by name, or the first that can serve. The kernels of every family share it."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

__all__ = ["find", "resolve", "unknown"]


class Implementation(Protocol):
    """What a family's own tuple of functions must have."""

    @property
    def name(self) -> str: ...


def find[I: Implementation](implementations: Sequence[I], name: str) -> I:
    """ValueError for an unknown name."""
    for implementation in implementations:
        if implementation.name == name:
            return implementation
    raise ValueError(unknown("implementation", name, [i.name for i in implementations]))


def resolve[I: Implementation](family: str, tried: Iterable[I], reason: Callable[[I], str | None]) -> I:
    """The first for which `reason` is None. ValueError with every reason where there is none."""
    reasons = []
    for implementation in tried:
        said = reason(implementation)
        if said is None:
            return implementation
        reasons.append(f"{implementation.name}: {said}")
    raise ValueError(f"{family} cannot be served here by " + "; ".join(reasons))


def unknown(argument: str, name: str, names: Sequence[str]) -> str:
    """The message for a name that is none of `names`."""
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"{argument}={name!r} is unknown; nearest: {nearest!r}, all: {', '.join(names)}, or None"
