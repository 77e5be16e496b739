"""Which ids two models have in common. Every id that a rollout contains must mean the same bytes in both.

Padded widths and added tokens may differ: ids that one side alone knows are masked. An id that means different things
on the two sides refuses the pair: no signal could be trusted then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int


class VocabularyError(ValueError):
    """Two vocabularies with a conflicting id."""


def by_id(vocabulary: Mapping[str, int]) -> dict[int, str]:
    """Id -> token, of a tokenizer's token -> id."""
    return {number: token for token, number in vocabulary.items()}


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """sha256 of what every id means."""
    ordered = sorted(by_id(vocabulary).items())
    return hashlib.sha256(json.dumps(ordered, ensure_ascii=False).encode()).hexdigest()


def shared_ids(
    proxy: Mapping[str, int], target: Mapping[str, int], names: tuple[str, str] = ("the proxy", "the target")
) -> Int[np.ndarray, " shared"]:
    """int32, ascending: the ids that both know.

    Raises VocabularyError, naming it, for an id that means another token on the other side; and where none is shared.
    """
    own, other = by_id(proxy), by_id(target)
    both = sorted(own.keys() & other.keys())
    conflicts = [number for number in both if own[number] != other[number]]
    if conflicts:
        first = conflicts[0]
        raise VocabularyError(
            f"token id {first} is {own[first]!r} in {names[0]} and {other[first]!r} in {names[1]} ({len(conflicts)} of "
            f"{len(both)} ids conflict): what one learned says nothing of the other's tokens. Take a proxy whose ids "
            "mean the same; added tokens and padded widths may differ"
        )
    if not both:
        raise VocabularyError(f"{names[0]} and {names[1]} have no token id in common")
    return np.array(both, np.int32)
