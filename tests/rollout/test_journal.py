"""Records come back bit by bit; a journal's torn end is dropped, and nothing before it."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.rollout.journal import Entry, Journal, JournalError, read, segments
from rlx.rollout.records import RecordError, group_tree, pack, read_group, unpack
from rlx.types import Count, Group, StopReason
from tests.records import make_group

ARRAYS = st.tuples(
    st.sampled_from(["int32", "float32", "bool", "uint8"]), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99)
).map(lambda d: np.random.default_rng(d[2]).integers(0, 2, d[1]).astype(d[0]))
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text() | ARRAYS
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    else:
        assert one == other


@given(TREES)
def test_any_tree_comes_back(tree):
    assert_same(unpack(pack(tree)), tree)


def test_a_record_that_is_cut_is_no_record():
    whole = pack({"a": np.arange(3), "b": [np.zeros((2, 2), bool)]})
    for size in range(len(whole)):
        with pytest.raises(RecordError, match=f"{size} bytes are no record"):
            unpack(whole[:size])


def test_arrays_that_are_read_can_be_written_to():
    """They are of their own memory, not of the file's."""
    read = unpack(pack({"a": np.arange(3)}))["a"]
    read[0] = 5
    assert read.flags.owndata or read.base.flags.owndata


def group(number: int, head_size: int = 2) -> Group:
    made = make_group((0, 1, 0.5), group=number, head_size=head_size, stop=StopReason.SESSION_LIMIT)
    task = dataclasses.replace(made.task, metadata={"entry": {"x": [1, None, "é"]}})
    return Group(task, tuple(dataclasses.replace(s, task=task) for s in made.samples))


def assert_same_group(one: Group, other: Group):
    assert one.task == other.task
    assert_same(unpack(pack(group_tree(one))), unpack(pack(group_tree(other))))
    assert all(s.task is other.task for s in other.samples)
    assert [s.version_spans for s in one.samples] == [s.version_spans for s in other.samples]
    assert [s.stop_reason for s in one.samples] == [s.stop_reason for s in other.samples]


@pytest.mark.parametrize("head_size", [0, 2])
def test_a_group_comes_back(head_size):
    one = group(3, head_size)
    other = read_group(unpack(pack(group_tree(one))))
    assert_same_group(one, other)
    assert (other.samples[0].head is None) == (head_size == 0)
    assert other.has_signal


def entry(number: int) -> Entry:
    return Entry(number, Count(10 * number, number, 1), group(number))


def written(directory, *numbers: int) -> Journal:
    journal = Journal(directory)
    for number in numbers:
        journal.append(entry(number))
    return journal


def test_what_was_appended_is_read_in_order(tmp_path):
    written(tmp_path / "new" / "directory", 3, 1, 2**40 + 7)
    read_back = list(read(tmp_path / "new" / "directory", 0))
    assert [e.number for e in read_back] == [3, 1, 2**40 + 7]
    assert read_back[0].generated == Count(30, 3, 1)
    assert_same_group(entry(1).group, read_back[1].group)


def test_another_process_reads_it_at_once(tmp_path):
    """Nothing waits in a buffer of this one: it may be killed at any moment."""
    journal = written(tmp_path, 1)
    assert [e.number for e in read(tmp_path, 0)] == [1]
    journal.append(entry(2))
    assert [e.number for e in read(tmp_path, 0)] == [1, 2]


def test_a_torn_end_is_dropped_wherever_it_is_torn(tmp_path):
    journal = written(tmp_path, 1, 2)
    journal.close()
    (_, path) = segments(tmp_path)[0]
    whole = path.read_bytes()
    lengths = []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        lengths.append(len(list(read(tmp_path, 0))))
    first = lengths.index(1)
    assert lengths == [0] * first + [1] * (len(whole) - first) + [2]


@pytest.mark.parametrize("offset", [-1, -20, 16, 40])
def test_a_damaged_record_ends_the_segment(tmp_path, offset):
    """The next segment is another matter."""
    written(tmp_path, 1).close()
    written(tmp_path, 2).close()
    path = segments(tmp_path)[0][1]
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 1
    path.write_bytes(damaged)
    assert [e.number for e in read(tmp_path, 0)] == [2]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "0.journal").write_bytes(b"rlxjrnl\x02")
    with pytest.raises(JournalError, match=r"0\.journal is no journal of format 1"):
        list(read(tmp_path, 0))


def test_a_process_writes_a_segment_of_its_own(tmp_path):
    for number in (1, 2, 3):
        written(tmp_path, number).close()
    assert [s for s, _ in segments(tmp_path)] == [0, 1, 2]
    assert [e.number for e in read(tmp_path, 1)] == [2, 3]


def test_checkpoints_begin_segments_and_prune_those_before(tmp_path):
    journal = written(tmp_path, 1)
    first = journal.rotate()
    journal.append(entry(2))
    second = journal.rotate()
    journal.append(entry(3))
    assert (first, second) == (1, 2)
    assert [e.number for e in read(tmp_path, first)] == [2, 3]
    assert [e.number for e in read(tmp_path, second)] == [3]
    journal.prune(first)
    assert [e.number for e in read(tmp_path, 0)] == [2, 3]
    journal.prune(second)
    assert [e.number for e in read(tmp_path, 0)] == [3]
    journal.append(entry(4))
    assert [e.number for e in read(tmp_path, second)] == [3, 4]


def test_a_record_says_what_it_is(tmp_path):
    """The format on disk: magic, then length and checksum, then JSON's length and JSON."""
    written(tmp_path, 1).close()
    data = segments(tmp_path)[0][1].read_bytes()
    assert data[:8] == b"rlxjrnl\x01"
    size = int.from_bytes(data[16:20], "little")
    record = json.loads(data[20 : 20 + size])
    assert (record["number"], record["generated"]) == (1, [10, 1, 1])
    assert record["group"]["samples"][0]["tokens"] == {"array": ["<i4", [7], 0, 28]}
