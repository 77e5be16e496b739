import pytest

from rlx.config import recipe
from rlx.config.errors import ConfigError


def problem(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe.load(name)
    (line,) = caught.value.problems
    return line


def test_a_missing_file_names_the_nearest(recipe_file):
    line = problem(str(recipe_file.with_name("smal.py")))
    assert line.endswith(f"smal.py: no such file; the nearest is {recipe_file}")


def test_a_missing_file_like_no_other_lists_the_folder(recipe_file):
    assert problem(str(recipe_file.with_name("zzz.py"))).endswith(f"{recipe_file.parent}/ has small.py")


def test_an_unknown_variant_names_the_nearest(recipe_file):
    assert problem(f"{recipe_file}:lnog").endswith("no variant 'lnog', there are short, long; the nearest is long")


def test_a_variant_of_a_recipe_without_variants_is_refused(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def get_config():\n    return 3\n")
    assert problem(f"{path}:big").endswith("the recipe takes no variant; leave out :big")
    assert recipe.load(str(path)) == 3


def test_a_recipe_that_needs_a_variant_says_so(tmp_path):
    path = tmp_path / "sizes.py"
    path.write_text("VARIANTS = ('one', 'two')\ndef get_config(variant):\n    return variant\n")
    assert problem(str(path)).endswith(f"say which variant, e.g. {path}:one")
    assert recipe.load(f"{path}:two") == "two"


@pytest.mark.parametrize(
    "text, line, words",
    [
        ("def get_config():\n    x = 1\n    return x / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all\n", 1, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def get_config(:\n", 1, "SyntaxError"),
        (
            "from configs.base import get_config as base\n"
            "def get_config():\n    c = base()\n    c.learner.updates = 'ten'\n    return c\n",
            4,
            "TypeError",
        ),
    ],
)
def test_an_error_inside_a_recipe_is_told_with_its_line(tmp_path, text, line, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert problem(str(path)).startswith(f"{path}:{line}: {words}")


def test_a_file_without_get_config_is_no_recipe(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("")
    assert problem(str(path)).endswith("has no function get_config()")


def test_a_file_of_another_kind_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.txt"
    path.write_text("")
    assert problem(str(path)).endswith("its name ends in .py")
