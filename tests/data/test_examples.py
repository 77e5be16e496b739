"""Supervised examples: split by question, dealt out in full rows, each once an epoch."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.data.examples import digest, epoch_batches, full_batches, most_that_fit, read_examples, split
from rlx.data.packing import PackingConfig, Trajectory, pack, rows_needed
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import open_conversation
from rlx.envs.python_tool import PYTHON
from tests.tiny_tokenizer import IM_END, build

PACKING = PackingConfig(row_tokens=32, row_targets=32, rows=2, capacity=2, head_size=0)


def example(prompt: int, length: int, written: int = 1) -> Trajectory:
    """`prompt` names its question."""
    tokens = np.full(length, prompt, np.int32)
    zeros = np.zeros(length, np.float32)
    return Trajectory(tokens, np.arange(length) >= length - written, 1.0, zeros, zeros.astype(np.int32), None)


def names(examples):
    return [int(e.tokens[0]) for e in examples]


def test_batches_go_through_every_example_before_one_comes_again():
    examples = [example(i, 4) for i in range(10)]
    batches = epoch_batches(examples, 3, None, seed=0)
    epochs = [[names(next(batches)) for _ in range(3)] for _ in range(4)]
    assert all(len({name for batch in epoch for name in batch}) == 9 for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 4


def test_an_epoch_of_full_rows_leaves_no_example_out():
    examples = [example(i, 5 + i % 9) for i in range(40)]
    batches = epoch_batches(examples, 0, PACKING, seed=0)
    for _ in range(3):
        seen = []
        while len(seen) < 40:
            seen += names(next(batches))
        assert sorted(seen) == list(range(40))


@given(st.lists(st.integers(2, 32), min_size=1, max_size=60))
def test_a_batch_holds_the_most_that_fits(lengths):
    examples = [example(i, length) for i, length in enumerate(lengths)]
    dealt = list(full_batches(examples, PACKING))
    assert names(itertools.chain(*dealt)) == list(range(len(lengths)))
    for batch in dealt:
        pack(batch, PACKING)
    count = most_that_fit(examples, PACKING)
    assert count == len(dealt[0])
    if count < len(lengths):
        assert rows_needed(examples[: count + 1], PACKING) > 4, "one more would not fit"


def test_rows_are_nearly_full():
    rng = np.random.default_rng(0)
    examples = [example(i, int(length)) for i, length in enumerate(rng.integers(2, 12, 300))]
    fills = [pack(batch, PACKING).fill_rate for batch in full_batches(examples, PACKING)]
    assert np.mean(fills[:-1]) > 0.9


def test_a_question_is_on_one_side_of_the_split_with_all_its_examples():
    examples = [example(i // 2, 6) for i in range(40)]
    training, validation = split(examples, 0.25, seed=1)
    assert len(validation) == 10
    assert not set(names(training)) & set(names(validation))
    assert sorted(names(training) + names(validation)) == sorted(names(examples))
    assert names(split(examples, 0.25, seed=1)[1]) == names(validation)
    assert names(split(examples, 0.25, seed=2)[1]) != names(validation)


def test_no_fraction_keeps_all_for_training():
    examples = [example(i, 6) for i in range(3)]
    assert split(examples, 0.0, seed=0) == (examples, [])


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"validation_fraction = 0.9: 2 different questions are too few"):
        split([example(0, 6), example(1, 6)], 0.9, seed=0)


def test_a_digest_is_of_tokens_masks_and_order():
    a, b = example(1, 6), example(2, 6)
    assert digest([a, b]) == digest([example(1, 6), example(2, 6)])
    assert len({digest(x) for x in ([a, b], [b, a], [a], [example(1, 6, written=2), b])}) == 4


# ---------------------------------------------------------------------------------------------------- several turns

TURNS = ["Let me see.", "4", "It is 4."]


@pytest.fixture(scope="module")
def conversation(tmp_path_factory):
    chat = load_chat_tokenizer(build(tmp_path_factory.mktemp("tokenizer")), "", "")
    return open_conversation(chat, "plain", (PYTHON,))


def write(path, record):
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return str(path)


def test_an_example_of_several_turns_is_rendered_as_a_session_is(tmp_path, conversation):
    path = write(tmp_path / "a.jsonl", {"question": "2 + 2?", "environment": "python_tool", "turns": TURNS})
    chat = conversation.chat
    (read,) = read_examples(path, chat, 512, (), {"python_tool": conversation})
    first, last = (np.append(chat.encode(text), IM_END) for text in (TURNS[0], TURNS[2]))
    between = conversation.following(["4"], first)
    np.testing.assert_array_equal(read.tokens, np.concatenate([conversation.opening("2 + 2?"), first, between, last]))
    assert chat.written_out(read.tokens[read.mask]) == "Let me see.<|im_end|>It is 4.<|im_end|>"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"turns": TURNS[:2]}, "must be"),
        ({"turns": []}, "must be"),
        ({"turns": ["a", "", "b"]}, "must be"),
        ({"turns": "a"}, "must be"),
        ({"environment": "code"}, "line 1: environment 'code'; the configuration's sources have 'python_tool'"),
    ],
)
def test_turns_that_are_none_are_refused(tmp_path, conversation, change, said):
    path = write(tmp_path / "a.jsonl", {"question": "?", "environment": "python_tool", "turns": TURNS, **change})
    with pytest.raises(ValueError, match=said):
        read_examples(path, conversation.chat, 512, (), {"python_tool": conversation})
