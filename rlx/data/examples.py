"""Supervised examples: read from JSONL, split, and dealt out in batches that pack well. numpy only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.data.packing import PackingConfig, Trajectory, computed_tokens, rows_needed
from rlx.envs.chat import ChatTokenizer
from rlx.envs.conversation import Conversation
from rlx.envs.extract import normalise_text
from rlx.types import Task


def read_examples(
    path: str,
    tokenizer: ChatTokenizer,
    row_tokens: int,
    held_out: Iterable[Task] = (),
    conversations: Mapping[str, Conversation] | None = None,
) -> list[Trajectory]:
    """The examples of a JSONL file, tokenised.

    A line is {"question": TEXT, "response": TEXT}, or with several turns {"question": TEXT, "environment": NAME,
    "turns": [RESPONSE, OBSERVATION, RESPONSE, ...]}, rendered as the environment's sessions are.

    conversations: by the name of their environment.

    Raises ValueError with file, line and what is wrong there; a question of the held-out tasks is wrong, too: what an
    evaluation asks must not have been taught.
    """
    asked = {normalise_text(task.question) for task in held_out}
    examples = []
    # A line ends with a newline only: JSON may hold other characters that str.splitlines takes for an end.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            record = _record(line, where, asked)
            tokens, mask = _encoded(record, where, tokenizer, conversations or {})
            if len(tokens) > row_tokens:
                raise ValueError(f"{where}: {len(tokens)} tokens; learner.row_tokens holds {row_tokens}")
            zeros = np.zeros(len(tokens), np.float32)
            examples.append(Trajectory(tokens, mask, 1.0, zeros, zeros.astype(np.int32), None))
    if not examples:
        raise ValueError(f"{path}: no examples in it")
    return examples


def _record(line: str, where: str, asked: set[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict) or not _is_text(record.get("question")) or not _says_something(record):
        raise ValueError(
            f'{where}: must be {{"question": TEXT, "response": TEXT}}, or {{"question": TEXT, "environment": NAME, '
            '"turns": [RESPONSE, OBSERVATION, RESPONSE, ...]}, none of them empty'
        )
    if normalise_text(record["question"]) in asked:
        raise ValueError(
            f"{where}: the question {record['question']!r} is one of the held-out tasks; remove the example"
        )
    return record


def _says_something(record: dict[str, Any]) -> bool:
    turns = record.get("turns")
    if turns is None:
        return _is_text(record.get("response"))
    return isinstance(turns, list) and len(turns) % 2 == 1 and all(map(_is_text, turns))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _encoded(
    record: dict[str, Any], where: str, tokenizer: ChatTokenizer, conversations: Mapping[str, Conversation]
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask) of an example; the mask is True on what the policy is to write."""
    if "turns" not in record:
        return tokenizer.encode_example(record["question"], record["response"])
    conversation = conversations.get(record.get("environment", ""))
    if conversation is None:
        raise ValueError(
            f"{where}: environment {record.get('environment')!r}; the configuration's sources have "
            f"{', '.join(map(repr, conversations)) or 'none with several turns'}"
        )
    parts, written = [conversation.opening(record["question"])], [False]
    for i, text in enumerate(record["turns"]):
        if i % 2:
            parts.append(conversation.following([text], parts[-1]))
        else:
            parts.append(np.append(tokenizer.encode(text), np.int32(tokenizer.end_of_turn_id)))
        written.append(i % 2 == 0)
    return np.concatenate(parts), np.repeat(written, [len(part) for part in parts])


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
