"""`rlx plan`: parameters counted from descriptions, those of an adapter by pattern and form."""

import json

import pytest

from rlx import plan
from rlx.config.errors import ConfigError


def planned(capsys, *words: str) -> dict:
    assert plan.main(["rlx plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "recipe, total, trainable",
    [
        ("configs/full_size.py:qwen3_8b", 8_190_735_360, 30_670_848),
        ("configs/qwen36_35b_proxy.py:final", 34_660_610_688, 36_433_920),
        ("configs/k31_target.py", 2_779_484_478_208, 24_518_066_176),
        ("configs/full_size.py:kimi_k2", 1_026_408_232_448, 122_054_656),
    ],
)
def test_counts(capsys, recipe, total, trainable):
    found = planned(capsys, f"--config={recipe}")
    assert (found["total_parameters"], found["trainable_parameters"]) == (total, trainable)
    assert found["trainable_share"] == pytest.approx(trainable / total)
    assert sum(found["adapted"].values()) == trainable


def test_published_active_parameters(capsys):
    assert planned(capsys, "--config=configs/full_size.py:kimi_k2")["active_parameters"] == 31_687_095_808
    assert planned(capsys, "--config=configs/full_size.py:qwen3_6_35b_a3b")["active_parameters"] == 2_946_429_568


def test_adapters_of_single_experts_are_twice_as_large(capsys):
    found = planned(capsys, "--config=configs/k31_target.py", "--config.lora.experts=per_expert")
    experts = {name: count for name, count in found["adapted"].items() if ".experts." in name}
    assert sum(experts.values()) == 896 * 92 * 32 * 3 * (3584 + 3072)


def test_without_an_adapter_everything_is_trained(capsys):
    found = planned(capsys, "--config=configs/full_size.py:qwen3_8b", "--config.lora.rank=0")
    assert found["trainable_parameters"] == found["total_parameters"]
    assert found["adapted"] == {}


def test_for_people_and_what_is_refused(capsys, tmp_path):
    assert plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final"]) == 0
    text = capsys.readouterr().out
    assert "34.66B parameters" in text
    assert "trainable: 36.43M, 0.11%" in text
    wrong = f"--config.model.path={tmp_path}"
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final", wrong])
    pattern = "--config.lora.targets=('self_atn.*',)"
    with pytest.raises(ConfigError, match=r"config\.lora\.targets: 'self_atn.\*' is .* the nearest is 'self_attn.\*'"):
        plan.main(["rlx plan", "--config=configs/qwen36_35b_proxy.py:final", pattern])
