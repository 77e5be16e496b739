"""`rlx simulate`: the command, its table, its JSON and its picture; the large run that it is meant to explain."""

from __future__ import annotations

import json
import sys

import pytest

from rlx import cli
from rlx.config import recipe
from rlx.config.axes import axis
from rlx.config.errors import ConfigError
from rlx.config.parse import dump, parse
from rlx.simulate import main, refuse_fitted
from rlx.simulation.run import simulate
from tests.simulation.small import hidden

KEYS = {"update_minutes", "trainer_wait_share", "age_mean", "age_max", "engine_occupancy", "tokens"}
RECIPE = """
from tests.simulation.small import tree

def get_config():
    return tree(learner__updates=8, simulate__trainer__update_seconds=2.0)
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return f"--config={path}"


def run(capsys, *words: str) -> str:
    assert main(["rlx simulate", *words]) == 0
    return capsys.readouterr().out


def test_json_has_the_figures_and_is_the_same_every_time(capsys, small):
    printed = run(capsys, small, "--json")
    values = json.loads(printed)
    assert set(values) >= KEYS
    assert 0 <= values["trainer_wait_share"] <= 1
    assert 0 < values["engine_occupancy"] <= 1
    assert values["age_mean"] <= values["age_max"] <= 2
    assert values["tokens"]["trained"] > 0
    assert run(capsys, small, "--json") == printed


def test_text_says_the_same(capsys, small):
    values = json.loads(run(capsys, small, "--json"))
    lines = run(capsys, small).splitlines()
    assert lines[0].split() == ["an", "update", f"{values['update_minutes']:.2f}", "min"]
    assert f"{values['trainer_wait_share']:.1%} of it" in lines[1]


def test_a_sweep_has_a_row_for_each_combination(capsys, small):
    sweep = ("--sweep", "sessions_in_flight=8,16,32", "--sweep=producer.max_policy_lag=1,4")
    lines = run(capsys, small, *sweep).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][:4] == ["sessions_in_flight", "max_policy_lag", "update, min", "wait share"]
    assert [row[:2] for row in rows[2:]] == [[s, lag] for s in ("8", "16", "32") for lag in ("1", "4")]
    assert len({len(line) for line in lines}) == 1
    found = json.loads(run(capsys, small, *sweep, "--json"))
    assert found[3]["settings"] == {"producer.sessions_in_flight": "16", "producer.max_policy_lag": "4"}
    alone = json.loads(run(capsys, small, "--json", "--config.producer.max_policy_lag=4"))
    assert {k: v for k, v in found[3].items() if k != "settings"} == alone


def test_pictures_are_drawn(capsys, small, tmp_path):
    one, many = tmp_path / "one.png", tmp_path / "new" / "many.png"
    run(capsys, small, f"--png={one}")
    run(capsys, small, f"--png={many}", "--sweep=sessions_in_flight=8,16", "--sweep=max_policy_lag=1,2")
    for path in (one, many):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000


def test_a_fit_replaces_what_is_simulated(capsys, small, tmp_path):
    records = []
    simulate(hidden(), records.append)
    (tmp_path / "config.json").write_text(dump(hidden()))
    (tmp_path / "timing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "quantiles, mean" in run(capsys, small, f"--fit={tmp_path}")
    fitted = json.loads(run(capsys, small, f"--fit={tmp_path}", "--json"))
    assert fitted["train_minutes"] != pytest.approx(2.0 / 60)


@pytest.mark.parametrize("word", ["--config.simulate.engines.step_seconds=2", "--sweep=step_seconds=1,2"])
def test_what_a_fit_would_replace_is_refused(word):
    with pytest.raises(ConfigError, match=r"config\.simulate\.engines\.step_seconds: --fit takes it"):
        refuse_fitted(["rlx simulate", word], [axis("--sweep", word.partition("=")[2])] if "sweep" in word else [])


@pytest.mark.parametrize(
    "text, key",
    [
        ("max_policy_lag=1", "producer.max_policy_lag"),
        ("producer.max_policy_lag=1", "producer.max_policy_lag"),
        ("config.producer.max_policy_lag=1", "producer.max_policy_lag"),
        ("step_seconds=1", "simulate.engines.step_seconds"),
    ],
)
def test_a_key_may_be_short(text, key):
    assert axis("--sweep", text) == (key, ["1"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("max_policy_lga=1", "max_policy_lag"),
        ("learning_rate=1", "which one of config.learner.learning_rate, config.sft.learning_rate"),
        ("max_policy_lag=1,,2", "give values"),
        ("max_policy_lag", "give values"),
    ],
)
def test_a_wrong_sweep_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        axis("--sweep", text)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--config.simulate.engines.count=0",), "config.simulate.engines.count = 0: must be at least 1"),
        (("--config.simulate.sessions.pass_rate.mean=1.5",), "config.simulate.sessions.pass_rate"),
        (("--config.simulate.sessions.turns.cv=-1.0",), "config.simulate.sessions.turns.cv = -1.0"),
        (("--config.simulate.sessions.turns.kind=quantiles",), "at least two ascending values"),
        (("--config.simulate.sessions.turns.quantiles=(1, 2)",), "only kind 'quantiles' uses them"),
        (("--sweep=max_policy_lag=-1",), "config.producer.max_policy_lag = -1"),
    ],
)
def test_a_wrong_setting_is_refused(capsys, small, words, said):
    with pytest.raises(SystemExit) as stopped:
        main(["rlx simulate", small, *words])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("--sweep=max_policy_lag=1,x",), ("--sweep=updates=8,2",), ("--png=picture.nosuch",)]
)
def test_what_cannot_be_done_is_refused_before_anything_is_simulated(monkeypatch, small, words):
    monkeypatch.setattr("rlx.simulate.simulate", lambda config: pytest.fail("it was simulated"))
    with pytest.raises((SystemExit, ConfigError)) as stopped:
        main(["rlx simulate", small, *words])
    assert not isinstance(stopped.value, SystemExit) or stopped.value.code == 2


def test_the_command_says_what_is_wrong(monkeypatch, capsys, small, tmp_path):
    monkeypatch.setattr(sys, "argv", ["rlx", "simulate", small, f"--fit={tmp_path}"])
    assert cli.main() == 2
    assert "there is no timing.jsonl" in capsys.readouterr().err


def target(**producer):
    c = recipe.load("configs/simulate_target.py")
    c.simulate.token_grain = 32
    c.producer.update(producer)
    return simulate(parse(c))


@pytest.mark.slow
def test_the_large_run_waits_and_more_sessions_or_lag_cost_age():
    """About 25 minutes an update, of which the trainer trains 8; sessions of 18,000 tokens that take 37 minutes."""
    result = target()
    assert 22 < result.update_minutes < 28
    assert result.train_minutes == pytest.approx(8.0)
    assert result.trainer_wait_share > 0.5
    assert result.age_max <= 4
    assert result.session_minutes == pytest.approx(37, rel=0.1)
    more = target(sessions_in_flight=192, max_policy_lag=8)
    assert more.trainer_wait_share < result.trainer_wait_share - 0.2
    assert more.age_mean > result.age_mean + 1
