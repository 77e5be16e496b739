"""A configuration that is right, for tests to break one key at a time."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs.base import get_config, source


@pytest.fixture
def tree(tmp_path: Path) -> ConfigDict:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    c = get_config()
    c.model.path = str(model)
    c.tasks.sources.chain = source(dataset="chain_sum", options=ConfigDict({"max_terms": 4, "digits": [1, 2]}))
    return c


@pytest.fixture
def recipe_file(tmp_path: Path, tree: ConfigDict) -> Path:
    """A recipe with two variants that builds `tree`."""
    path = tmp_path / "small.py"
    path.write_text(
        "from configs.base import get_config as base, source\n"
        "VARIANTS = ('', 'short', 'long')\n"
        "def get_config(variant='short'):\n"
        "    c = base()\n"
        f"    c.model.path = {tree.model.path!r}\n"
        "    c.tasks.sources.chain = source(dataset='chain_sum')\n"
        "    c.learner.updates = {'short': 2, 'long': 50}[variant]\n"
        "    return c\n"
    )
    return path
