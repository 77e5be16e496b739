"""`rlx show`: a run in the terminal, its page, and what is said of anything else."""

import json
import os
import socket
import sys

import pytest

from rlx import cli, show
from tests import run_directory, tiny_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return run_directory.write(tiny_run.write(tmp_path))


def squeezed(text):
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def rlx(monkeypatch, capsys, *words):
    """(status, stdout, stderr) of `rlx show WORDS`."""
    monkeypatch.setattr(sys, "argv", ["rlx", "show", *map(str, words)])
    status = cli.main()
    return status, *capsys.readouterr()


def test_a_run_is_summarised(run, monkeypatch, capsys):
    status, text, _ = rlx(monkeypatch, capsys, run)
    assert status == 0
    for said in (
        "tiny complete, 4 of 4 updates",
        "LoRA of rank 4, loss tis",
        "90 s, 1.5 GiB, policy in adapter",
        "after 4 0.750 [0.550, 0.950] 20",
        "pass rate 25.0% ▁▃▆█ 100.0%",
        "trained 64 100.0%",
        "reward 1, update 4, sums/4",
        "reward 0, update 4, sums/4",
        "answer 2, read as '7'; 4 tokens, ended by stop",
    ):
        assert said in squeezed(text), said
    assert "no_signal" not in text, "an empty bin of the ledger"


def test_a_run_in_progress(run, monkeypatch, capsys):
    (run / "summary.json").unlink()
    assert "stopped" in rlx(monkeypatch, capsys, run)[1]
    (run / "lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert f"running, 4 of 4 updates (process {os.getpid()})" in rlx(monkeypatch, capsys, run)[1]


@pytest.mark.parametrize(
    "kind, said", [("TrainingStopped", "A guard stopped it: it fell."), ("OSError", "It ended with OSError: it fell.")]
)
def test_a_run_that_ended_with_an_error_says_which(run, monkeypatch, capsys, kind, said):
    (run / "summary.json").unlink()
    (run / "stopped.json").write_text(json.dumps({"kind": kind, "reason": "it fell."}))
    text = rlx(monkeypatch, capsys, run)[1]
    assert said in text
    assert ("continues it" in text) == (kind == "OSError")


def test_a_run_without_records(run, monkeypatch, capsys):
    for name in ("metrics.jsonl", "samples.jsonl", "ledger.json", "summary.json"):
        (run / name).unlink()
    status, text, _ = rlx(monkeypatch, capsys, run)
    assert status == 0
    assert "0 of 4 updates" in text
    assert "Nothing is recorded yet" in text


def test_supervised_steps(run, monkeypatch, capsys):
    losses = [{"update": 0, "step": step, "sft/loss": 2.0 / (step + 1)} for step in range(4)]
    tiny_run.write_jsonl(run / "metrics.jsonl", losses)
    text = squeezed(rlx(monkeypatch, capsys, run)[1])
    assert "3 of 0 supervised steps" in text
    assert "loss, nats 2 █▃▂▁ 0.5" in text


def test_how_many_samples_are_shown(run, monkeypatch, capsys):
    assert rlx(monkeypatch, capsys, run, "--samples", "0")[1].count("ended by") == 0
    assert rlx(monkeypatch, capsys, run, "--samples", "1")[1].count("ended by") == 2


def test_a_long_response_is_cut(tmp_path, monkeypatch, capsys):
    run = run_directory.write(tiny_run.write(tmp_path), text="x" * 700)
    assert "(100 characters more)" in " ".join(rlx(monkeypatch, capsys, run)[1].replace("│", " ").split())


def test_what_is_no_run(run, monkeypatch, capsys):
    status, text, error = rlx(monkeypatch, capsys, run.with_name("tinny"))
    assert (status, text) == (1, "")
    assert error.endswith(f"does not exist; the nearest run is {run}\n")


def test_a_damaged_file(run, monkeypatch, capsys):
    (run / "metrics.jsonl").write_text("nonsense\n{}\n")
    status, _, error = rlx(monkeypatch, capsys, run)
    assert status == 1
    assert f"{run / 'metrics.jsonl'}:1: not a JSON object" in error


def test_a_page(run, monkeypatch, capsys, tmp_path):
    status, text, _ = rlx(monkeypatch, capsys, run, "--html")
    assert (status, text) == (0, f"20 samples in {run / 'samples.html'}: open it in a browser\n")
    assert '"tokens"' in (run / "samples.html").read_text()
    assert rlx(monkeypatch, capsys, run, "--html", tmp_path / "x.html")[0] == 0
    assert (tmp_path / "x.html").is_file()


def test_a_page_of_a_run_whose_model_has_gone(run, monkeypatch, capsys, tmp_path):
    (tmp_path / "model" / "tokenizer.json").unlink()
    status, _, error = rlx(monkeypatch, capsys, run, "--html")
    assert status == 0
    assert "no token by token view" in error


@pytest.mark.parametrize(
    "values, line", [([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([1.5, 1.5], "▁▁"), ([3], "▁"), ([-1, 1], "▁█")]
)
def test_sparklines(values, line):
    assert show.sparkline(values) == line


def test_a_long_sparkline_shows_means():
    assert show.sparkline([0, 0, 1, 1, 2, 2], width=3) == "▁▅█"
    assert len(show.sparkline(list(range(1000)), width=28)) == 28
