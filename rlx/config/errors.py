"""What is said when a configuration is wrong: every problem at once, each with its key, its value and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """One line for each problem of a configuration."""

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def said(key: str, value: object, demand: str) -> str:
    """The problem line for a dotted `key` whose value must be another."""
    return f"config.{key} = {value!r}: {demand}"


def nearest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option most like `word`, None where none is alike."""
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_key(key: str, value: object, known: Iterable[str]) -> str:
    """The problem line for a dotted `key` that is none of the `known` ones.

    The nearest key of the same section is offered, else the key of that name in another section, else the section.
    """
    known = list(known)
    section, _, name = key.rpartition(".")
    siblings = list(dict.fromkeys(k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section))
    shown = f"{key} = {value!r}: no such key"
    if close := nearest(name, siblings):
        return f"{shown}; the nearest is {section}.{close}"
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    if close := nearest(name, elsewhere, cutoff=0.8):
        return f"{shown}; the nearest is {elsewhere[close]}"
    if not siblings:
        return shown
    return f"{shown}; {section} has {', '.join(siblings)}"
