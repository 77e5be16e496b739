"""Axes of a sweep, as the command line writes them: a setting and the values that it takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from rlx.config.errors import ConfigError, unknown_key
from rlx.config.parse import schema_keys

Axis = tuple[str, Sequence[str]]  # a dotted key below `config`, and its values as they are written


def axis(option: str, text: str) -> Axis:
    """("producer.max_policy_lag", ["1", "4"]) of `max_policy_lag=1,4`. A name that one key alone has stands for it.

    Args:
      option: the flag that `text` was given to, for messages.

    Raises:
      ConfigError: no such key, several of them, or no values.
    """
    name, _, values = text.partition("=")
    known = [key for key, hint in schema_keys() if not dataclasses.is_dataclass(hint)]
    full = name if name.startswith("config.") else f"config.{name}"
    matches = [full] if full in known else [k for k in known if "." not in name and k.endswith(f".{name}")]
    if not matches:
        raise ConfigError(f"{option}: {unknown_key(full, values, known)}")
    if len(matches) > 1:
        raise ConfigError(f"{option} {name}: which one of {', '.join(matches)}?")
    if not all(values.split(",")):
        raise ConfigError(f"{option} {text}: give values, for instance {name}=1,2,4")
    return matches[0].removeprefix("config."), values.split(",")


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination of the axes' values, the last axis fastest."""
    keys = [key for key, _ in axes]
    return [dict(zip(keys, values)) for values in itertools.product(*(values for _, values in axes))]
