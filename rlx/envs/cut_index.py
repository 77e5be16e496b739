"""The index of a directory of cuts: of which task each is, and the step that begins there (`rlx.rollout.cuts`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

INDEX = "index.json"


class Place(NamedTuple):
    """Where a cut is."""

    task: str  # the id of the whole task
    step: int  # from 0


def read_index(directory: Path) -> dict[str, Place]:
    """The cuts of a directory by digest. Raises ValueError where there are none, or those of another version."""
    file = directory / INDEX
    if not file.is_file():
        raise ValueError(f"there are no cuts in {directory}: `rlx cuts record` makes them")
    try:
        return {digest: Place(**place) for digest, place in json.loads(file.read_text(encoding="utf-8")).items()}
    except TypeError as error:
        raise ValueError(f"{file} is of another version ({error}): record the cuts again") from error


def write_index(index: Mapping[str, Place]) -> bytes:
    """What `INDEX` has."""
    return json.dumps({digest: place._asdict() for digest, place in index.items()}, indent=1, sort_keys=True).encode()
