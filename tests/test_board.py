"""`rlx tensorboard`: what it serves, that it answers, and that it ends."""

import json
import signal
import socket
import sys
import urllib.request

import pytest

from rlx import board, cli
from tests import run_directory, tiny_run


@pytest.fixture
def run(tmp_path):
    return run_directory.write(tiny_run.write(tmp_path))


def fetch(url):
    with urllib.request.urlopen(url, timeout=300) as answer:
        return answer.read().decode()


def rlx(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["rlx", "tensorboard", *map(str, words)])
    status = cli.main()
    return status, *capsys.readouterr()


def test_the_command_serves_a_run_until_it_is_ended(run):
    with tiny_run.start("rlx.cli", "tensorboard", str(run), "--port=0") as process:
        said = process.stdout.readline()
        url = said.split()[3].removesuffix(board.DASHBOARD)
        runs = json.loads(fetch(f"{url}data/runs"))
        tags = json.loads(fetch(f"{url}data/plugin/scalars/tags"))
        layout = json.loads(fetch(f"{url}data/plugin/custom_scalars/layout"))
        hparams = json.loads(fetch(f"{url}data/plugins_listing"))["hparams"]
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=300)
    assert said.startswith("TensorBoard of tiny: http://127.0.0.1:")
    assert runs == ["tiny"]
    assert "reward/pass_rate" in tags["tiny"]
    assert layout["category"][0]["title"] == "Is it learning?"
    assert hparams["enabled"]
    assert (process.returncode, rest, error) == (0, "TensorBoard has ended.\n", "")


def test_a_directory_of_runs_is_served_with_what_comes_later(run, tmp_path):
    other = run_directory.write(tmp_path / "recipe.py", run__name="other")
    folders = board.event_folders(run.parent)
    assert folders == {"tiny": run / "events", "other": other / "events"}
    (tmp_path / "logdir").mkdir()
    for _ in range(2):
        board.link(folders, tmp_path / "logdir")
    assert sorted(p.name for p in (tmp_path / "logdir").iterdir()) == ["other", "tiny"]
    assert (tmp_path / "logdir" / "tiny").resolve() == (run / "events").resolve()
    (run / "supervised" / "events").mkdir(parents=True)
    assert board.event_folders(run)["tiny-sft"] == run / "supervised" / "events"
    (run / "supervised" / "config.json").write_bytes((run / "config.json").read_bytes())
    assert board.event_folders(run / "supervised") == {"tiny-sft": run / "supervised" / "events"}


def test_a_port_that_is_taken(run, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, text, error = rlx(monkeypatch, capsys, run, f"--port={port}")
    assert (status, text) == (1, "")
    assert f"TensorBoard cannot serve on 127.0.0.1:{port}" in error
    assert "give another --port" in error


def test_what_has_nothing_to_show(run, monkeypatch, capsys):
    status, _, error = rlx(monkeypatch, capsys, run.with_name("tinny"))
    assert status == 1
    assert f"the nearest run is {run}" in error
    (run / "events").rename(run / "gone")
    status, _, error = rlx(monkeypatch, capsys, run)
    assert status == 1
    assert "has no TensorBoard events" in error
