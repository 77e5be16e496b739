import json
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlx.metrics.jsonl import JsonlWriter, encode, read_json, read_jsonl, write_json


def test_encode_takes_numpy_and_numbers_that_json_lacks(tmp_path):
    value = {"a": np.float32(0.5), "b": np.arange(3), "c": (float("nan"), -np.inf), "d": tmp_path, "e": True}
    assert json.loads(encode(value)) == {
        "a": 0.5,
        "b": [0, 1, 2],
        "c": ["NaN", "-Infinity"],
        "d": str(tmp_path),
        "e": True,
    }


def test_one_number_that_json_lacks_changes_nothing_else():
    value = {1: [np.float64(0.1), np.float32(0.1), np.int64(3), "Infinity"], "mapping": MappingProxyType({"a": (1, 2)})}
    plain, with_nan = json.loads(encode(value)), json.loads(encode({**value, "nan": [np.full(2, np.nan)]}))
    assert with_nan == {**plain, "nan": [["NaN", "NaN"]]}
    assert plain == {"1": [0.1, float(np.float32(0.1)), 3, "Infinity"], "mapping": {"a": [1, 2]}}


def test_encode_refuses_what_it_does_not_know():
    with pytest.raises(TypeError):
        encode({"a": object()})


def test_write_json_replaces_at_once_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "summary.json"
    for value in ({"a": 1}, {"b": [1.5, None]}):
        write_json(path, value)
        assert read_json(path) == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_write_json_keeps_the_old_content_where_the_new_cannot_be_encoded(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}


def filled(path, updates=(0, 1, 1, 2)):
    writer = JsonlWriter(path)
    for update in updates:
        writer.append({"update": update, "text": "line\nbreak é"})
    return writer


def test_records_come_back_in_order(tmp_path):
    filled(tmp_path / "metrics.jsonl").close()
    records, torn = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["update"] for r in records] == [0, 1, 1, 2]
    assert records[0]["text"] == "line\nbreak é"
    assert torn == 0


def test_a_record_needs_its_update(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="whole number 'update', got keys \\['loss'\\]"):
        writer.append({"loss": 1.0})


@pytest.mark.parametrize("count, kept", [(3, [0, 1, 1]), (4, [0, 1, 1, 2]), (0, [])])
def test_keep_drops_later_records_and_appending_goes_on(tmp_path, count, kept):
    writer = filled(tmp_path / "metrics.jsonl")
    assert writer.keep(count) == 4 - count
    writer.append({"update": 7})
    assert [r["update"] for r in read_jsonl(writer.path)[0]] == [*kept, 7]
    assert writer.count == count + 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_cut_anywhere_loses_at_most_the_line_that_was_cut(tmp_path, data):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    filled(path, range(12)).close()
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert len(read_jsonl(path)[0]) == whole
    writer = JsonlWriter(path)
    assert writer.torn == (not content[:cut].endswith(b"\n") and cut > 0)
    writer.append({"update": 99})
    assert [r["update"] for r in read_jsonl(path)[0]] == [*range(whole), 99]


@pytest.mark.parametrize("last", [b'{"update": 3', b'{"update": 3}', b"\0\0\0\n", b"3\n"])
def test_a_torn_last_line_is_dropped_and_counted(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    filled(path).close()
    path.write_bytes(path.read_bytes() + last)
    records, torn = read_jsonl(path)
    assert (len(records), torn) == (4, 1)


def test_a_torn_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 0}\n{"upda\n{"update": 2}\n')
    for open_it in (read_jsonl, JsonlWriter):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .* not the last line"):
            open_it(path)
    assert path.read_bytes().startswith(b'{"update": 0}\n{"upda\n')
