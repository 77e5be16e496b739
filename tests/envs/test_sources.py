import dataclasses

import pytest
from reasoning_gym.factory import DATASETS

from rlx.config.schema import TaskSourceConfig
from rlx.envs.sources import check_source, read_source

SUMS = TaskSourceConfig(dataset="chain_sum", path="", options={}, size=5, weight=1.0, grader="")


def change(**changes):
    return dataclasses.replace(SUMS, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dataset": "chain_sun"}, r"tasks.sources.a.dataset = 'chain_sun' .* did you mean 'chain_sum'"),
        ({"options": {"max_term": 3}}, r"a.options.max_term is not an option of chain_sum; did you mean 'max_terms'"),
        ({"options": {"zzz": 3}}, r"there are allow_negation, max_digits"),
        ({"options": {"seed": 3}}, r"a.options.seed is not an option: set tasks.seed"),
        ({"options": {"size": 3}}, r"a.options.size is not an option: set tasks.sources.a.size"),
        ({"dataset": "game_of_life_halting"}, r"refused: any text at all scores 1.0 there"),
        ({"dataset": "composite"}, r"refused: it has no questions of its own"),
        ({"path": "x.jsonl"}, r"set one of dataset .* and path .*; both are set"),
        ({"dataset": ""}, r"set one of dataset .* and path .*; neither is set"),
        ({"weight": 0.0}, r"a.weight = 0.0: it must be above 0"),
        ({"weight": float("nan")}, r"a.weight = nan"),
        ({"size": 0}, r"a.size = 0: at least 1"),
        ({"grader": "nubmer"}, r"a.grader = 'nubmer' is not a grader; did you mean 'number'"),
        ({"dataset": "", "path": "absent.jsonl"}, r"a.path = 'absent.jsonl': there is no such file"),
        ({"dataset": "", "path": __file__, "options": {"max_terms": 2}}, r"options belong to a dataset"),
        ({"dataset": "", "path": __file__, "grader": "reasoning_gym"}, r"grades reasoning-gym datasets only"),
    ],
)
def test_wrong_values_are_refused_with_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        check_source("a", change(**changes))


def test_datasets_that_change_with_the_hash_seed_need_a_fixed_one(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        check_source("a", change(dataset="ransom_note"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_source("a", change(dataset="ransom_note"))


@pytest.mark.parametrize("name", ["game_of_life_halting", "composite", "ransom_note", "word_ladder", "knight_swap"])
def test_the_names_with_rules_of_their_own_exist(name):
    assert name in DATASETS


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"options": {"min_terms": 3, "max_terms": 2}}, "does not work with options .*max_terms must be >= min_terms"),
        ({"options": {"min_terms": "two"}}, "does not work with options .*TypeError"),
        ({"dataset": "arc_agi", "size": 1}, "its own answer scores 0.05"),
        ({"dataset": "graph_color", "grader": "exact"}, "'exact' needs a gold answer, which graph_color does not give"),
    ],
)
def test_datasets_that_do_not_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_source("a", change(**changes), seed=0)


def test_dataset_tasks_carry_what_their_grader_needs():
    source = change(options={"max_terms": 2, "max_digits": 1})
    tasks = read_source("a", source, seed=0)
    assert [t.id for t in tasks] == [f"a/{i}" for i in range(5)]
    assert {t.grader for t in tasks} == {"reasoning_gym"}
    assert tasks[0].metadata["dataset"] == "chain_sum"
    assert tasks[0].metadata["entry"]["answer"] == tasks[0].answer
    assert read_source("a", source, seed=0) == tasks


def test_neighbouring_seeds_and_other_names_share_no_run_of_items():
    options = {"max_terms": 6, "min_digits": 4}
    questions = [
        {t.question for t in read_source(name, change(size=40, options=options), seed)}
        for name, seed in [("a", 0), ("a", 1), ("b", 0)]
    ]
    assert not questions[0] & questions[1]
    assert not questions[0] & questions[2]


def read_lines(tmp_path, *lines, grader=""):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    source = change(dataset="", path=str(path), grader=grader)
    check_source("a", source)
    return read_source("a", source, seed=0)


def test_a_file_is_read_whole_with_the_graders_of_its_lines(tmp_path):
    lines = [
        '{"question": "1 + 1?", "answer": 2}',
        "",
        '{"question": "A colour?", "answer": "blue"}',
        '{"question": "Half?", "answer": "\\\\frac{1}{2}", "grader": "math_verify"}',
        *(f'{{"question": "{i} + 0?", "answer": "{i}"}}' for i in range(SUMS.size)),
    ]
    tasks = read_lines(tmp_path, *lines)
    assert [t.id for t in tasks[:3]] == ["a/1", "a/3", "a/4"]
    assert [(t.answer, t.grader) for t in tasks[:3]] == [
        ("2", "number"),
        ("blue", "exact"),
        ("\\frac{1}{2}", "math_verify"),
    ]
    assert len(tasks) == 3 + SUMS.size
    assert {t.grader for t in read_lines(tmp_path, *lines, grader="exact")} == {"exact", "math_verify"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"tasks.jsonl, line 2: not JSON"),
        ("[1]", r"line 2: list instead of an object"),
        ('{"question": "1?"}', r"line 2: 'answer' is missing"),
        ('{"answer": "1"}', r"line 2: 'question' is missing"),
        ('{"question": "1?", "answer": null}', r"line 2: 'answer' is None"),
        ('{"question": " ", "answer": "1"}', r"line 2: 'question' is ' '"),
        ('{"question": "1?", "anwser": "1"}', r"line 2: unknown key 'anwser'; did you mean 'answer'"),
        ('{"question": "1?", "answer": "1", "grader": "numer"}', r"grader 'numer' cannot .* did you mean 'number'"),
        ('{"question": "1?", "answer": "1", "grader": "reasoning_gym"}', r"grader 'reasoning_gym' cannot grade"),
        ('{"question": "1?", "answer": NaN}', r"line 2: the answer NaN is no number"),
        ('{"question": 5, "answer": "5"}', r"line 2: 'question' is '5'"),
        ('{"question": "\\ud800?", "answer": "1"}', r"line 2: 'question' has half of a surrogate pair"),
        ("[" * 100_000, r"line 2: (nested too deeply|not JSON)"),
        ('{"question": "1?", "answer": "one", "grader": "number"}', r"needs a number as the answer, found 'one'"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_lines(tmp_path, '{"question": "0?", "answer": "0"}', line)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tasks"):
        read_lines(tmp_path, "", "")


@pytest.mark.parametrize("written", ["123456789012345678.25", "1" + "0" * 5000, "1e400", "0.10"])
def test_a_number_stays_as_it_is_written(tmp_path, written):
    (task,) = read_lines(tmp_path, f'{{"question": "1?", "answer": {written}}}')
    assert task.answer == written
