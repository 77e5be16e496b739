"""Every experiment runs as a script, in its small form, and becomes a notebook."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import ROOT

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_it_runs_and_draws(path, tmp_path):
    cache = tmp_path / ".cache"  # programs are compiled once, not once for each run of this test
    cache.mkdir()
    (cache / "jax").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    environment = os.environ | {
        "RLX_SMOKE": "1",
        "RLX_FIGURES": str(tmp_path / "figures"),
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    figures = list((tmp_path / "figures").iterdir())
    assert figures
    assert all(figure.stat().st_size > 1000 for figure in figures)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_it_becomes_a_notebook(path, tmp_path):
    """`make notebooks` runs this command for each of them."""
    command = ["jupytext", "--to", "ipynb", "--output", str(tmp_path / "it.ipynb"), str(path)]
    subprocess.run([sys.executable, "-m", *command], capture_output=True, check=True)
    cells = json.loads((tmp_path / "it.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown"
    assert first.startswith("# ")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 1
    assert all(ast.parse(text) for text in code)


def test_experiments_are_numbered_in_the_order_to_read_them():
    numbers = [int(Path(path).name.partition("_")[0]) for path in EXPERIMENTS]
    assert numbers == list(range(1, len(EXPERIMENTS) + 1))
