"""docs/tour.ipynb is the tour, executed."""

import ast
import json

import jupytext
import pytest

from tests.tiny_run import ROOT

TOUR = ROOT / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def cells():
    return json.loads(TOUR.read_text(encoding="utf-8"))["cells"]


def test_it_is_made_of_the_tour(cells):
    tour = jupytext.read(ROOT / "experiments" / "01_tour.py")
    expected = [(cell.cell_type, cell.source) for cell in tour.cells]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == expected, "the tour has changed: run `make tour`"


def test_every_cell_was_executed_without_an_error(cells):
    for cell in cells:
        if cell["cell_type"] == "code" and ast.parse("".join(cell["source"])).body:
            assert cell["execution_count"], cell["source"]
            assert [o["ename"] for o in cell["outputs"] if o["output_type"] == "error"] == []
    said = "".join("".join(o.get("text", ())) for cell in cells for o in cell.get("outputs", ()))
    for words in ("135", "largest |log p - log q|", "held-out pass rate   after"):
        assert words in said, "with the real model"
    kinds = {kind for cell in cells for o in cell.get("outputs", ()) for kind in o.get("data", ())}
    assert "image/png" in kinds


def test_it_is_small():
    assert TOUR.stat().st_size < 1_000_000
