"""The reference of all keys, written from `configs/base.py` (defaults, comments) and the schema (types).

python -m rlx.config.docs [configs/base.py [docs/configuration.md]]
"""

from __future__ import annotations

import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.parse import describe, schema_keys
from rlx.config.simulation import DistributionConfig

HEAD = """# Configuration

Written by `make docs` from `configs/base.py`: change the comments there. A recipe starts from these values; any key can
be changed on the command line, for instance `--config.learner.learning_rate=3e-5`. A tuple is written
`--config.eval.k='(1, 2)'`, a switch `--config.metrics.tensorboard=false`.
"""


# The names of ConfigDicts in configs/base.py.
ROOTS = {"c": "config", "entry": "config.tasks.sources.NAME", "spread": "config.simulate.sessions.DISTRIBUTION"}


def page(base: str) -> str:
    """The Markdown page for the source text of `configs/base.py`. Raises KeyError for a key that it does not set."""
    written = _assignments(base)
    sections: dict[str, list[str]] = {}
    for key, hint in _keys():
        if not dataclasses.is_dataclass(hint) or hint is DistributionConfig:
            section, _, name = key.rpartition(".")
            default, comment = written[key]
            cells = (f"`{name}`", f"`{default}`", describe(hint).replace("'", "`"), _cell(comment))
            sections.setdefault(section, []).append(f"| {' | '.join(cells)} |\n")
    head = "| key | default | type | meaning |\n| --- | --- | --- | --- |\n"
    return HEAD + "".join(f"\n## `{section}`\n\n{head}{''.join(rows)}" for section, rows in sections.items())


def _keys() -> Iterator[tuple[str, Any]]:
    """The schema's, but those of a distribution once, not below every key that is one."""
    keys = list(schema_keys())
    inside = tuple(f"{key}." for key, hint in keys if hint is DistributionConfig)
    yield from ((key, hint) for key, hint in keys if not key.startswith(inside))
    yield from schema_keys(DistributionConfig, ROOTS["spread"])


def _assignments(source: str) -> dict[str, tuple[str, str]]:
    """Dotted key -> (the default as written, the comment behind it)."""
    comments = _comments(source)
    assigned = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            root, _, path = ast.unparse(node.targets[0]).partition(".")
            default = ast.unparse(node.value).replace("ConfigDict()", "{}")
            assigned[f"{ROOTS[root]}.{path}"] = (default, comments.get(node.end_lineno or 0, ""))
    return assigned


def _comments(source: str) -> dict[int, str]:
    """Line -> the comment at its end, with the lines of nothing but a comment right below it."""
    comments: dict[int, str] = {}
    above = 0  # the line whose comment still goes on
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, alone = token.start[0], token.line.lstrip().startswith("#")
            above = above if alone and above else line
            comments[above] = f"{comments.get(above, '')} {token.string.lstrip('# ')}".strip()
        elif token.type not in (tokenize.NL, tokenize.NEWLINE):
            above = 0
    return comments


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str]) -> None:
    base, out = [*argv, *("configs/base.py", "docs/configuration.md")[len(argv) :]]
    Path(out).write_text(page(Path(base).read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
