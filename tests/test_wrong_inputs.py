"""Each wrong configuration and input is refused before any work, by a message that names it and the way out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rlx import cli
from rlx.metrics.rundir import open_run
from rlx.rollout.local import LocalEngine
from rlx.train import train
from tests import tiny_run
from tests.wrong_inputs import COMMAND_LINES, DATA, MODELS, RECIPE, RUNS, Wrong, many


def refused(monkeypatch, capsys, words: list[str]) -> str:
    """What `rlx train` says before it leaves; fails where it begins to work."""

    async def generate(self, request):
        raise AssertionError("generation was started")

    monkeypatch.setattr(LocalEngine, "generate", generate)
    monkeypatch.setattr(sys, "argv", ["rlx", "train", *words])
    try:
        status = cli.main()
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr().err
    assert status in (1, 2), said
    assert said.startswith("rlx train: ")
    return said


def check_said(wrong: Wrong, said: str) -> None:
    missing = [part for part in wrong.said if part not in said]
    assert not missing, said


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny_run.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("wrong", [*COMMAND_LINES, *MODELS, *DATA], ids=lambda wrong: wrong.name)
def test_it_is_refused_before_any_work(wrong, folder, monkeypatch, capsys):
    wrong.prepare()
    check_said(wrong, refused(monkeypatch, capsys, list(wrong.words)))
    written = [path for path in folder.glob("runs/*/*") if path.is_file() and path.name != "lock"]
    assert [path.name for path in written if path.name.endswith("l") and path.stat().st_size] == []
    assert list(folder.glob("runs/*/checkpoints/*")) == []


@pytest.mark.parametrize("wrong", COMMAND_LINES, ids=lambda wrong: wrong.name)
def test_a_wrong_command_line_makes_no_directory(wrong, folder, monkeypatch, capsys):
    wrong.prepare()
    refused(monkeypatch, capsys, list(wrong.words))
    assert not (folder / "runs").exists()


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """The runs directory of a finished run."""
    directory = tmp_path_factory.mktemp("used")
    train(tiny_run.config(tiny_run.write(directory), learner__updates=1))
    return directory / "runs"


@pytest.mark.parametrize("wrong", RUNS, ids=lambda wrong: wrong.name)
def test_a_run_that_cannot_be_continued_is_left_as_it_is(wrong, used, folder, monkeypatch, capsys):
    shutil.copytree(used, "runs")
    wrong.prepare()
    before = contents(folder / "runs" / "tiny")
    check_said(wrong, refused(monkeypatch, capsys, list(wrong.words)))
    assert contents(folder / "runs" / "tiny") == before


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_run_that_another_process_writes_is_refused(folder, monkeypatch, capsys):
    with open_run(folder / "runs" / "tiny", "auto"):
        said = refused(monkeypatch, capsys, [RECIPE])
    assert "runs/tiny is being written by process" in said
    assert "choose another run.name" in said


def test_a_start_that_was_refused_does_not_use_the_directory_up(folder, monkeypatch, capsys):
    good = Path("tasks.jsonl").read_text()
    many("three")()
    refused(monkeypatch, capsys, [RECIPE, "--config.run.resume=never"])
    Path("tasks.jsonl").write_text(good)
    monkeypatch.undo()
    config = tiny_run.config(folder / "recipe.py", run__resume="never", learner__updates=1)
    assert train(config)["updates"] == 1
