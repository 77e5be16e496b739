"""The tour runs as a script, and every experiment becomes a notebook."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import ROOT

EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))


@pytest.mark.slow
def test_the_tour_runs_as_a_script(tmp_path):
    """With the tiny model. Its last part is the real command, in a process of its own."""
    cache = tmp_path / ".cache"  # programs are compiled once, not once for each run of this test
    cache.mkdir()
    (cache / "jax").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    environment = os.environ | {
        "RLX_SMOKE": "1",
        "RLX_FIGURES": str(tmp_path / "figures"),
        "MPLBACKEND": "Agg",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    script = [sys.executable, str(ROOT / "experiments" / "01_tour.py")]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "the nearest is 'cispo'",
        "reward 1.0",
        "32 samples in ",
        "offpolicy/ess            1\n",
        "(VersionSpan(version=1, ",
        "held-out pass rate   after: ",
        "samples.jsonl ",
    ):
        assert said in done.stdout
    gap = re.search(r"largest \|log p - log q\| over \d+ tokens: (\S+)", done.stdout)
    assert gap is not None
    assert float(gap[1]) < 1e-4
    assert (tmp_path / "figures" / "01_tour.png").read_bytes().startswith(b"\x89PNG")


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
