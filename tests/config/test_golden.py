import dataclasses
import shutil
from pathlib import Path

import pytest

from rlx.config import docs, golden
from rlx.config.parse import schema_keys
from rlx.config.simulation import DistributionConfig

ROOT = Path(__file__).parents[2]


def test_every_recipe_is_what_its_golden_dump_says():
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "golden").glob("*.txt")}
    made = golden.dumps(ROOT / "configs")
    assert "base.txt" in made
    assert made == kept, "a recipe changed; if that was meant, run `make golden` and look at the diff"


def test_dumps_cover_the_variants(tmp_path):
    shutil.copy(ROOT / "configs" / "base.py", tmp_path / "plain.py")
    (tmp_path / "sized.py").write_text(
        "from configs.base import get_config as base\nVARIANTS = ('wide',)\n"
        "def get_config(variant='narrow'):\n    c = base()\n    c.run.name = variant\n    return c\n"
    )
    texts = golden.dumps(tmp_path)
    assert list(texts) == ["plain.txt", "sized.txt", "sized.wide.txt"]
    assert '"name": "narrow"' in texts["sized.txt"]
    assert '"name": "wide"' in texts["sized.wide.txt"]


def test_rewriting_removes_the_dumps_of_recipes_that_are_gone(tmp_path):
    out = tmp_path / "golden"
    out.mkdir()
    (out / "gone.txt").write_text("old")
    golden.main([str(ROOT / "configs"), str(out)])
    assert not (out / "gone.txt").exists()
    assert (out / "base.txt").read_text(encoding="utf-8") == golden.dumps(ROOT / "configs")["base.txt"]


def test_the_reference_of_keys_is_current():
    page = docs.page((ROOT / "configs" / "base.py").read_text(encoding="utf-8"))
    kept = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == kept, "configs/base.py or the schema changed: run `make docs`"


def test_a_row_of_the_reference_has_default_type_and_comment():
    page = docs.page((ROOT / "configs" / "base.py").read_text(encoding="utf-8"))
    assert "| `group_size` | `8` | int | samples of one task |" in page
    hints = [hint for _, hint in schema_keys()]
    distributions = hints.count(DistributionConfig)  # a row each; their own keys have one section
    settings = sum(not dataclasses.is_dataclass(hint) for hint in hints)
    inside = len(dataclasses.fields(DistributionConfig))
    assert page.count("\n| `") == settings - distributions * (inside - 1) + inside
    assert page.count("`distribution(kind='beta', mean=0.5, cv=0.6)` | dict | over tasks |") == 1


def test_comments_may_go_on_in_the_lines_below():
    assert docs._comments("x = 1  # one\n#   more\ny = 2\n# alone\n") == {1: "one more", 4: "alone"}


def test_a_key_that_the_base_does_not_set_is_an_error():
    with pytest.raises(KeyError, match=r"config\.run\.name"):
        docs.page("c.run.seed = 0\n")
