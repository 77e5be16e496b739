import dataclasses
import json
import math
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import config_dict

from configs.base import get_config
from rlx.config.errors import ConfigError, nearest, unknown_key
from rlx.config.parse import EVERY_KEY, annotation, describe, dump, parse, parse_recorded, schema_keys, to_dict


def problems(tree) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    return caught.value.problems


def test_base_configuration_has_every_key_of_the_schema_and_no_other():
    assert to_dict(parse(get_config())) == get_config().to_dict()


def test_values_arrive_where_the_schema_says(tree):
    tree.learner.learning_rate = 3e-5
    tree.eval.k = (1,)
    config = parse(tree)
    assert config.learner.learning_rate == 3e-5
    assert config.eval.k == (1,)
    assert config.tasks.sources["chain"].dataset == "chain_sum"
    assert config.tasks.sources["chain"].options == {"max_terms": 4, "digits": (1, 2)}
    assert config.model.path == tree.model.path


def test_records_are_frozen(tree):
    config = parse(tree)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learner.updates = 3
    assert config.learner.updates == 100


def test_dump_is_json_that_parses_back(tree):
    config = parse(tree)
    assert parse(json.loads(dump(config))) == config
    assert list(json.loads(dump(config))) == [field.name for field in dataclasses.fields(config)]


@given(
    rate=st.floats(allow_nan=False), updates=st.integers(), on=st.booleans(), text=st.text(), k=st.lists(st.integers())
)
def test_any_well_typed_value_survives_the_round_trip(rate, updates, on, text, k):
    tree = get_config().to_dict()
    tree["learner"] |= {"learning_rate": rate, "updates": updates}
    tree["metrics"]["tensorboard"] = on
    tree["tasks"]["suffix"] = text
    tree["eval"]["k"] = k
    config = parse(json.loads(dump(parse(tree))))
    assert (config.learner.learning_rate, config.learner.updates) == (rate, updates)
    assert (config.metrics.tensorboard, config.tasks.suffix, config.eval.k) == (on, text, tuple(k))


def test_an_int_is_taken_for_a_float_and_becomes_one():
    tree = get_config().to_dict()
    tree["rollout"]["temperature"] = 1
    temperature = parse(tree).rollout.temperature
    assert temperature == 1.0
    assert type(temperature) is float


@pytest.mark.parametrize(
    "section, key, value, line",
    [
        ("learner", "updates", True, "config.learner.updates = True: must be int, not bool"),
        ("learner", "updates", 2.0, "config.learner.updates = 2.0: must be int, not float"),
        ("learner", "learning_rate", "1e-4", "config.learner.learning_rate = '1e-4': must be float, not str"),
        ("learner", "learning_rate", None, "config.learner.learning_rate = None: must be float, not NoneType"),
        ("learner", "learning_rate", False, "config.learner.learning_rate = False: must be float, not bool"),
        ("metrics", "tensorboard", 1, "config.metrics.tensorboard = 1: must be bool, not int"),
        ("run", "name", 3, "config.run.name = 3: must be str, not int"),
        ("lora", "targets", "q_proj", "config.lora.targets = 'q_proj': must be tuple of str, not str"),
        ("lora", "targets", ("q_proj", 3), "config.lora.targets[1] = 3: must be str, not int"),
        ("objective", "advantage_ddof", 2, "config.objective.advantage_ddof = 2: must be one of 0, 1"),
        ("objective", "advantage_ddof", True, "config.objective.advantage_ddof = True: must be one of 0, 1"),
        ("tasks", "sources", 3, "config.tasks.sources = 3: must be dict, not int"),
        ("tasks", "sources", {"chain": "x"}, "config.tasks.sources.chain = 'x': must be dict, not str"),
    ],
)
def test_a_wrong_type_is_named(section, key, value, line):
    tree = get_config().to_dict()
    tree[section][key] = value
    assert problems(tree) == (line,)


def test_a_choice_outside_the_list_names_the_nearest():
    tree = get_config()
    tree.run.resume = "atuo"
    (line,) = problems(tree)
    assert line == "config.run.resume = 'atuo': must be one of 'auto', 'never', 'must'; the nearest is 'auto'"


def test_an_unknown_key_names_its_neighbour():
    tree = get_config()
    tree.learner.learning_rat = 1.0
    key = "config.learner.learning_rat"
    assert problems(tree) == (f"{key} = 1.0: no such key; the nearest is {key}e",)


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one():
    tree = get_config()
    tree.learner.group_size = 4
    assert problems(tree) == ("config.learner.group_size = 4: no such key; the nearest is config.rollout.group_size",)


def test_an_unknown_key_like_no_other_lists_the_section():
    tree = get_config()
    tree.checkpoint.zzzzzzzz = 4
    assert problems(tree) == ("config.checkpoint.zzzzzzzz = 4: no such key; config.checkpoint has every, keep",)


def test_an_unknown_key_of_a_task_source_is_named_with_the_source(tree):
    tree.tasks.sources.chain.wieght = 2.0
    key = "config.tasks.sources.chain"
    assert problems(tree) == (f"{key}.wieght = 2.0: no such key; the nearest is {key}.weight",)


def test_missing_keys_and_sections_are_named():
    tree = get_config()
    del tree.learner.updates
    del tree.sft
    assert problems(tree) == (
        f"config.sft: missing, must be dict; {EVERY_KEY}",
        f"config.learner.updates: missing, must be int; {EVERY_KEY}",
    )


def test_a_run_of_an_older_rlx_is_told_which_key_its_file_lacks(tree, tmp_path):
    written = tree.to_dict()
    assert parse_recorded(written, tmp_path / "config.json") == parse(tree)
    del written["engine"]["lanes"]
    with pytest.raises(ConfigError) as caught:
        parse_recorded(written, tmp_path / "config.json")
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"{tmp_path / 'config.json'}: config.engine.lanes: missing, must be int; the run is of an older rlx"
    )


def test_a_value_that_json_cannot_hold_is_refused_where_anything_else_goes(tree):
    tree.tasks.sources.chain.options.terms = {1, 2}
    (line,) = problems(tree)
    assert line == "config.tasks.sources.chain.options.terms = {1, 2}: must be what JSON can hold, not set"


def test_a_required_value_that_was_never_given_is_named():
    tree = get_config()
    del tree.model.path
    tree.model.path = config_dict.required_placeholder(str)
    assert problems(tree) == ("config.model.path = None: must be str, not NoneType",)


def test_references_between_keys_are_followed():
    tree = get_config()
    tree.engine.context = tree.learner.get_ref("row_tokens") * 2
    assert parse(tree).engine.context == 2 * tree.learner.row_tokens


def test_all_problems_come_at_once_one_a_line():
    tree = get_config()
    tree.run.resume = "sometimes"
    tree.eval.evry = 2
    del tree.engine.slots
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["config.run.resume", "config.engine.slots:", "config.eval.evry"]


def test_floats_that_are_no_numbers_are_left_to_the_checks():
    tree = get_config()
    tree.learner.learning_rate = math.nan
    assert math.isnan(parse(tree).learner.learning_rate)


def test_annotations_are_found_through_dicts_of_records():
    assert annotation("config.tasks.sources.anything.weight") is float
    assert annotation("config.learner.nothing") is None
    assert annotation("config.tasks.sources.chain.options.max_terms") is None
    assert dict(schema_keys())["config.tasks.sources.NAME.weight"] is float


@pytest.mark.parametrize(
    "hint, words",
    [(int, "int"), (tuple[str, ...], "tuple of str"), (Literal["a", "b"], "'a', 'b'"), (dict[str, Any], "dict")],
)
def test_annotations_in_words(hint, words):
    assert describe(hint) == words


def test_nearest_offers_nothing_where_nothing_is_alike():
    assert nearest("qwerty", ["auto", "never"]) is None
    assert unknown_key("config.a.b", 1, []) == "config.a.b = 1: no such key"
