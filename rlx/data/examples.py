"""Supervised examples: read from JSONL, split, and dealt out in batches that pack well. numpy only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rlx.data.packing import PackingConfig, Trajectory, computed_tokens, rows_needed
from rlx.envs.chat import ChatTokenizer
from rlx.envs.extract import normalise_text
from rlx.types import Task


def read_examples(
    path: str, tokenizer: ChatTokenizer, row_tokens: int, held_out: Iterable[Task] = ()
) -> list[Trajectory]:
    """The examples of a JSONL file, tokenised.

    Raises ValueError with file, line and what is wrong there; a question of the held-out tasks is wrong, too: what an
    evaluation asks must not have been taught.
    """
    asked = {normalise_text(task.question) for task in held_out}
    examples = []
    # A line ends with a newline only: JSON may hold other characters that str.splitlines takes for an end.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            examples.append(_example(line, f"{path}, line {number}", tokenizer, row_tokens, asked))
    if not examples:
        raise ValueError(f"{path}: no examples in it")
    return examples


def _example(line: str, where: str, tokenizer: ChatTokenizer, row_tokens: int, asked: set[str]) -> Trajectory:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    found = [record.get(k) for k in ("question", "response")] if isinstance(record, dict) else []
    texts = [text for text in found if isinstance(text, str) and text]
    if len(texts) < 2:
        raise ValueError(f'{where}: must be {{"question": TEXT, "response": TEXT}}, none of them empty')
    if normalise_text(texts[0]) in asked:
        raise ValueError(f"{where}: the question {texts[0]!r} is one of the held-out tasks; remove the example")
    tokens, mask = tokenizer.encode_example(*texts)
    if len(tokens) > row_tokens:
        raise ValueError(f"{where}: {len(tokens)} tokens; learner.row_tokens holds {row_tokens}")
    zeros = np.zeros(len(tokens), np.float32)
    return Trajectory(tokens, mask, 1.0, zeros, zeros.astype(np.int32), None)


def split(examples: Sequence[Trajectory], fraction: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, validation): about `fraction` of the prompts, with every example of them, are for validation.

    Raises:
      ValueError: where one side would be empty.
    """
    if not fraction:
        return list(examples), []
    prompts = [example.tokens[~example.mask].tobytes() for example in examples]
    different = list(dict.fromkeys(prompts))
    count = max(1, round(fraction * len(different)))
    if count >= len(different):
        raise ValueError(
            f"sft.validation_fraction = {fraction}: {len(different)} different questions are too few to split; give "
            "more examples, or 0"
        )
    chosen = np.random.default_rng(seed).permutation(len(different))[:count]
    apart = {different[i] for i in chosen}
    training = [e for e, prompt in zip(examples, prompts, strict=True) if prompt not in apart]
    return training, [e for e, prompt in zip(examples, prompts, strict=True) if prompt in apart]


def digest(examples: Sequence[Trajectory]) -> str:
    """Of all tokens and masks, in their order: the same examples give the same batches."""
    sha = hashlib.sha256()
    for example in examples:
        sha.update(len(example.tokens).to_bytes(8, "little") + example.tokens.tobytes() + example.mask.tobytes())
    return sha.hexdigest()[:16]


def epoch_batches(
    examples: Sequence[Trajectory], size: int, packing: PackingConfig | None, seed: int
) -> Iterator[list[Trajectory]]:
    """Endless batches of examples, each epoch in a new order; no batch has an example twice.

    Of `size` examples each (the rest of an epoch that is no whole batch is left out of it), or, with `packing`, of as
    many as its rows hold: the next ones in the epoch's order, so that rows are full and no example is left out.
    """
    rng = np.random.default_rng(seed)
    while True:
        order = [examples[i] for i in rng.permutation(len(examples))]
        if packing is None:
            yield from (order[at : at + size] for at in range(0, len(order) - size + 1, size))
        else:
            yield from full_batches(order, packing)


def full_batches(examples: Sequence[Trajectory], packing: PackingConfig) -> Iterator[list[Trajectory]]:
    """The examples in their order, in batches of as many as fit the packing."""
    at = 0
    while at < len(examples):
        count = most_that_fit(examples[at:], packing)
        yield list(examples[at : at + count])
        at += count


def most_that_fit(examples: Sequence[Trajectory], packing: PackingConfig) -> int:
    """How many of the first examples can be packed together, found by bisection; at least 1."""
    rows = packing.capacity * packing.rows
    low, high = 1, _upper_bound(examples, packing)
    while low < high:
        middle = (low + high + 1) // 2
        if rows_needed(examples[:middle], packing) <= rows:
            low = middle
        else:
            high = middle - 1
    return low


def _upper_bound(examples: Sequence[Trajectory], packing: PackingConfig) -> int:
    """The first examples that have more tokens to compute than the rows; the next cannot be in the batch."""
    room, total = packing.capacity * packing.rows * packing.row_tokens, 0
    for count, example in enumerate(examples, 1):
        total += computed_tokens(example)
        if total > room:
            return count
    return len(examples)
