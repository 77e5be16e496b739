import collections
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.config.schema import TasksConfig, TaskSourceConfig
from rlx.envs.extract import normalise_text
from rlx.envs.tasks import apportion, build_tasks


def dataset(name="chain_sum", size=60, weight=1.0, **options):
    return TaskSourceConfig(dataset=name, path="", options=options, size=size, weight=weight, grader="")


def file(path, rows, weight=1.0):
    path.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in rows), encoding="utf-8")
    return TaskSourceConfig(dataset="", path=str(path), options={}, size=0, weight=weight, grader="")


def config(held_out=0, seed=0, **sources):
    texts = {"system_prompt": "", "suffix": "", "split": ""}
    return TasksConfig(sources=sources, seed=seed, held_out=held_out, train=0, **texts)


ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def test_train_and_held_out_share_no_question():
    # 200 questions exist, 700 are made: nearly all repeat, within a source and between the two.
    made = config(50, a=dataset(size=300, **ONE_DIGIT), b=dataset(size=400, **ONE_DIGIT))
    train, held_out = build_tasks(made)
    questions = [normalise_text(t.question) for t in train + held_out]
    assert len(held_out) == 50
    assert len(questions) == len(set(questions)) <= 200


def test_the_split_is_a_function_of_the_seed():
    sources = {"a": dataset(max_digits=3), "b": dataset("gcd")}
    first, again, other = (build_tasks(config(20, seed, **sources)) for seed in (0, 0, 1))
    assert first == again
    assert {t.question for t in first[1]} != {t.question for t in other[1]}
    reordered = build_tasks(config(20, 0, **dict(reversed(sources.items()))))
    assert reordered == first


def test_held_out_is_shared_by_weight():
    made = config(30, a=dataset(weight=2.0, max_digits=4), b=dataset("gcd", weight=1.0))
    train, held_out = build_tasks(made)
    assert collections.Counter(t.source for t in held_out) == {"a": 20, "b": 10}
    assert {t.source for t in train} == {"a", "b"}


def test_questions_that_differ_by_spacing_and_case_are_one(tmp_path):
    rows = [("What is one?", "1"), ("what  is ONE?", "1"), ("What is two?", "2")]
    train, _ = build_tasks(config(a=file(tmp_path / "a.jsonl", rows)))
    assert [t.id for t in train] == ["a/1", "a/3"]


def test_one_question_with_two_answers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a/1 and a/2 ask the same question with different answers, '1' and '2'"):
        build_tasks(config(a=file(tmp_path / "a.jsonl", [("One?", "1"), ("One?", "2")])))


def test_a_source_without_a_question_of_its_own_is_refused(tmp_path):
    rows = [("One?", "1"), ("Two?", "2")]
    sources = {"a": file(tmp_path / "a.jsonl", rows), "b": file(tmp_path / "b.jsonl", rows[:1])}
    with pytest.raises(ValueError, match=r"tasks.sources.b has no distinct questions left"):
        build_tasks(config(**sources))


@pytest.mark.parametrize(
    "held_out, weight, message",
    [
        (10, 1.0, r"held_out = 10 takes 5 from tasks.sources.a, which has 3 distinct .* hold out at most 4"),
        (9, 9.0, r"held_out = 9 takes 8 from tasks.sources.a, which has 3 distinct .* hold out at most 2"),
        (-1, 1.0, r"held_out = -1: it must be 0 \(none\) or more"),
    ],
)
def test_holding_out_too_much_is_refused_with_what_fits(tmp_path, held_out, weight, message):
    sources = {
        "a": file(tmp_path / "a.jsonl", [(f"a{i}?", str(i)) for i in range(3)], weight),
        "b": file(tmp_path / "b.jsonl", [(f"b{i}?", str(i)) for i in range(9)]),
    }
    with pytest.raises(ValueError, match=message):
        build_tasks(config(held_out, **sources))


def test_the_largest_held_out_that_the_error_names_is_accepted(tmp_path):
    sources = {
        "a": file(tmp_path / "a.jsonl", [(f"a{i}?", str(i)) for i in range(3)]),
        "b": file(tmp_path / "b.jsonl", [(f"b{i}?", str(i)) for i in range(9)]),
    }
    train, held_out = build_tasks(config(4, **sources))
    assert (len(train), len(held_out)) == (8, 4)


def test_no_sources_are_refused():
    with pytest.raises(ValueError, match=r"tasks.sources is empty"):
        build_tasks(config())


def test_every_source_is_checked_before_any_is_generated():
    slow = dataset("sokoban", size=10**9)
    with pytest.raises(ValueError, match="did you mean 'gcd'"):
        build_tasks(config(a=slow, b=dataclasses.replace(dataset(), dataset="gcdd")))


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=4, max_size=4))
def test_shares_sum_to_the_total_and_are_within_one_of_the_weights(total, weights):
    named = dict(zip("abcd", weights, strict=True))
    shares = apportion(total, named)
    assert sum(shares.values()) == total
    assert all(abs(shares[k] - total * w / sum(weights)) < 1 + 1e-6 for k, w in named.items())


def test_fewer_tasks_to_train_on_are_some_of_the_same():
    made = config(5, a=dataset(max_digits=3))
    train, held_out = build_tasks(made)
    fewer, same = build_tasks(dataclasses.replace(made, train=7))
    assert (len(fewer), same) == (7, held_out)
    assert {t.id for t in fewer} < {t.id for t in train}


def test_a_split_says_what_is_trained_on_and_held_out(tmp_path):
    made = config(5, a=dataset(max_digits=3))
    ids = [t.id for t in build_tasks(made)[0]]
    file = tmp_path / "edge.json"
    file.write_text(json.dumps({"train": ids[:3], "held_out_similar": ids[3:4], "held_out_new": ids[4:6]}))
    train, held_out = build_tasks(dataclasses.replace(made, split=str(file)))
    assert ([t.id for t in train], [t.id for t in held_out]) == (ids[:3], ids[3:6])


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no such file; `rlx edge` writes one"),
        ({"train": []}, "is no split"),
        ({"train": ["nobody/1"], "held_out_similar": [], "held_out_new": []}, "such as 'nobody/1'"),
    ],
)
def test_a_wrong_split_says_so(tmp_path, content, words):
    file = tmp_path / "edge.json"
    if content is not None:
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        build_tasks(dataclasses.replace(config(5, a=dataset(max_digits=3)), split=str(file)))
