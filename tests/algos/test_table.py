import typing
from pathlib import Path

import pytest

from rlx.algos.table import TOPICS, choices, page
from rlx.config.objective import DistillConfig, ObjectiveConfig

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_is_current():
    assert DOCS.read_text(encoding="utf-8") == page(), "run: python -m rlx.algos.table"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.key)
def test_every_choice_is_listed_with_its_formula_and_source(topic):
    section, _, name = topic.key.rpartition(".")
    record = DistillConfig if section else ObjectiveConfig
    known = set(typing.get_args(typing.get_type_hints(record)[name])) - {"off"}
    assert {choice.name for choice in choices(topic.chooses)} == known


def test_every_key_with_choices_is_a_topic():
    for record, prefix in ((ObjectiveConfig, ""), (DistillConfig, "distill.")):
        hints = typing.get_type_hints(record)
        keys = {prefix + k for k, hint in hints.items() if {str} == set(map(type, typing.get_args(hint)))}
        assert keys - {"kl_placement"} <= {topic.key for topic in TOPICS}
