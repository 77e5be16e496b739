"""Every recipe, and every variant of one, as text: a change of a setting shows in the diff of a file.

python -m rlx.config.golden [configs [tests/golden]]
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlx.config import recipe
from rlx.config.parse import dump, parse


def dumps(recipes: Path) -> dict[str, str]:
    """`base.txt`, `quickstart.variant.txt`, ... -> text, for every recipe in a directory. Raises ConfigError."""
    texts = {}
    for path in sorted(recipes.glob("*.py")):
        for variant in ("", *recipe.variants(recipe.load_module(path))):
            suffix = f".{variant}" if variant else ""
            tree = recipe.load(f"{path}:{variant}" if variant else str(path))
            texts[f"{path.stem}{suffix}.txt"] = dump(parse(tree))
    return texts


def rewrite(recipes: Path, golden: Path) -> None:
    """Makes `golden` hold the dumps of `recipes`, and no other text."""
    texts = dumps(recipes)
    golden.mkdir(parents=True, exist_ok=True)
    for path in golden.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (golden / name).write_text(text, encoding="utf-8")


def main(argv: list[str]) -> None:
    recipes, golden = [*argv, *("configs", "tests/golden")[len(argv) :]]
    rewrite(Path(recipes), Path(golden))


if __name__ == "__main__":
    main(sys.argv[1:])
