"""Prompts whose keys and values are ready for slots: computed in full batches, shared by whoever asks the same."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from rlx.models import sampler
from rlx.models.sampler import Prefilled
from rlx.models.spec import Architecture, Params

_KEPT = 2  # the newest batches stay, though nobody waits for them: the same prompt is often asked again soon


def rows_for(rows: int, prompts: int) -> int:
    """Rows of the computation of `prompts` prompts where `rows` are the most."""
    return rows if 2 * prompts > rows else 1


Prompt = tuple[bytes, np.ndarray]  # (key, int32 tokens [n]); equal prompts have equal keys


class PromptCache:
    """Of one version of the weights: `clear` it when others are loaded.

    Args:
      buckets: lengths that prefill is compiled for, tokens, ascending; the last is the longest possible.
      rows: prompts of one computation. Where there are half as many or fewer, each is computed alone.
    """

    def __init__(self, arch: Architecture, buckets: tuple[int, ...], rows: int):
        self.arch, self.buckets, self.rows = arch, buckets, rows
        self._places: dict[bytes, tuple[int, int]] = {}
        self._batches: dict[int, Prefilled] = {}  # by number, in the order in which they were made
        self._numbers = itertools.count()

    def __getitem__(self, key: bytes) -> tuple[int, int]:
        """(number of its batch, row) of a prompt that was prepared."""
        return self._places[key]

    def batch(self, number: int) -> Prefilled:
        return self._batches[number]

    def clear(self) -> None:
        self._places.clear()
        self._batches.clear()

    def prepare(self, params: Params, wanted: Iterable[Prompt], upcoming: Iterable[Prompt]) -> int:
        """Have the keys and values of all `wanted` prompts; those of `upcoming` ones fill what is left of a batch.

        Returns tokens computed, without padding.
        """
        missing: dict[int, dict[bytes, np.ndarray]] = defaultdict(dict)
        for key, tokens in wanted:
            if key not in self._places:
                missing[self._bucket(tokens)][key] = tokens
        for key, tokens in upcoming if missing else ():
            batch = missing.get(self._bucket(tokens), {})
            if len(batch) % self.rows and key not in self._places:
                batch[key] = tokens
        for bucket, prompts in missing.items():
            for chunk in itertools.batched(prompts.items(), self.rows):
                self._compute(params, bucket, chunk)
        return sum(len(tokens) for prompts in missing.values() for tokens in prompts.values())

    def forget(self, needed: Collection[bytes]) -> None:
        """Drop old batches that hold no prompt of `needed`."""
        kept = {self._places[key][0] for key in needed if key in self._places} | set(list(self._batches)[-_KEPT:])
        self._batches = {number: batch for number, batch in self._batches.items() if number in kept}
        self._places = {key: place for key, place in self._places.items() if place[0] in kept}

    def _bucket(self, tokens: np.ndarray) -> int:
        return next(b for b in self.buckets if b >= len(tokens))

    def _compute(self, params: Params, bucket: int, prompts: Sequence[Prompt]) -> None:
        size = rows_for(self.rows, len(prompts))
        for chunk in itertools.batched(prompts, size):
            tokens, lengths = np.zeros((size, bucket), np.int32), np.ones(size, np.int32)
            for row, (_, prompt) in enumerate(chunk):
                tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            number = next(self._numbers)
            self._batches[number] = sampler.prefill(self.arch, params, tokens, lengths)
            self._places |= {key: (number, row) for row, (key, _) in enumerate(chunk)}
