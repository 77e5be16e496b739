"""The experiments on the algorithms run as scripts, shortened. What each finds it asserts itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def run_script(name: str, figures: Path) -> str:
    """What a shortened experiment prints; its figure goes to `figures`."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "Agg", "XLA_FLAGS": ""}
    environment |= {"JAX_PLATFORMS": "cpu", "RLX_SMOKE": "1", "RLX_FIGURES": str(figures)}
    script = ROOT / "experiments" / f"{name}.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name, printed",
    [
        ("02_advantages_by_hand", "1 of 4 groups without signal"),
        pytest.param("03_staleness", "sequence ratio ", marks=pytest.mark.slow),
        pytest.param("04_score_centering", "TIS, centred ", marks=pytest.mark.slow),
    ],
)
def test_an_experiment_runs_and_draws_its_figure(name, printed, tmp_path):
    output = run_script(name, tmp_path / "figures")
    assert printed in output
    assert "nan" not in output
    (figure,) = (tmp_path / "figures").iterdir()
    assert figure.name == f"{name}.png"
    assert figure.read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["02_advantages_by_hand", "03_staleness", "04_score_centering"])
def test_the_documentation_shows_the_figure_and_the_command_that_made_it(name):
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert f"python experiments/{name}.py" in page
    assert f"(figures/{name}.png)" in page
    assert (ROOT / "docs" / "figures" / f"{name}.png").read_bytes().startswith(PNG)
