"""`rlx diff`: every key has a rule, and the two shipped configurations give the table of the two runs."""

import json

import pytest

from rlx import diff
from rlx.config.errors import ConfigError
from rlx.config.parse import schema_keys
from rlx.proxy.diff import amount, rule_of
from tests.proxy import made_runs
from tests.tiny_run import ROOT

TARGET, PROXY = str(ROOT / "configs" / "k31_target.py"), str(ROOT / "configs" / "qwen36_35b_proxy.py")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The recipes name their models from the project's directory."""
    monkeypatch.chdir(ROOT)


def table(capsys, *arguments):
    code = diff.main([*arguments, "--json"])
    record = json.loads(capsys.readouterr().out)
    return code, record, {row["setting"]: (row["first"], row["second"], row["kind"]) for row in record["settings"]}


def test_every_key_has_a_rule():
    for key, _ in schema_keys():
        assert rule_of(key.removeprefix("config."))[1]
    with pytest.raises(KeyError, match=r"no rule for 'nothing.at_all'"):
        rule_of("nothing.at_all")


def test_the_target_beside_the_proxy_s_first_try(capsys):
    code, record, rows = table(capsys, TARGET, f"{PROXY}:first_try")
    assert code == 0
    assert record["algorithm_differs_in"] == []
    assert rows["nodes"][:2] == (
        "7 of 8 GPUs: 3 trainer + 4 inference",
        "2 of 8 GPUs: 1 trainer + 1 inference",
    )
    assert rows["trainer layout"][:2] == ("TP4 PP3 CP2 DP1 EP8", "TP1 PP1 CP1 DP8")
    assert rows["thinking"] == ("low", "off", "must change")
    assert rows["sessions in flight"] == ("96", "256", "search again")
    assert rows["policy lag"] == ("4", "8", "search again")
    assert rows["training sample limit"][:2] == ("24,576 tokens", "32,768 tokens")
    assert rows["session stop"][:2] == ("none", "none")
    assert rows["batch"] == ("8 tasks x 8 samples", "8 tasks x 8 samples", "must stay")


def test_the_target_beside_the_proxy_s_final_form(capsys):
    _, record, rows = table(capsys, TARGET, f"{PROXY}:final")
    assert rows["trainer layout"][1] == "TP1 PP1 CP2 DP4"
    assert rows["session stop"][1] == "at 61,440 tokens"
    assert rows["tasks"][:2] == ("22 edge tasks", "24 edge tasks")
    assert rows["engines"][1].startswith("16 x 1 GPU")
    assert rows["validation"][1] == "a separate job, every 5. saved version; 10 held-out tasks x 8"
    target, proxy = record["sides"]
    assert amount(target["total_parameters"]) == "2.78T"
    assert amount(target["trainable_parameters"]) == "24.5B"
    assert target["trainable_share"] == pytest.approx(0.0088, abs=1e-4)
    assert amount(proxy["trainable_parameters"]) == "36.4M"


def test_another_algorithm_is_said_and_ends_with_a_status_of_its_own(capsys, tmp_path):
    runs = [made_runs.write(tmp_path, name, learner__updates=n) for name, n in (("a", 20), ("b", 40))]
    code, record, _ = table_of_runs(capsys, *runs)
    assert code == diff.EXIT_OTHER_ALGORITHM
    assert record["algorithm_differs_in"] == ["learner.updates"]


def table_of_runs(capsys, first, second):
    """Settings that a run's version did not have are shown as such."""
    code = diff.main([str(first), str(second), "--json"])
    return code, json.loads(capsys.readouterr().out), None


def test_it_writes_what_it_prints(capsys, tmp_path):
    assert diff.main([TARGET, f"{PROXY}:final", f"--to={tmp_path}"]) == 0
    assert (tmp_path / "diff.md").read_text() == capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"diff.json", "diff.md", "diff.html"}


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        diff.main(["configs/k31_targt.py", PROXY])
