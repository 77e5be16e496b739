"""Families of models by their config.json: both styles, variants without a stored checkpoint, published sizes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlx.models import mxfp4
from rlx.models.description import Attention, Experts, LatentAttention, Mlp, Rope, grouped, slots
from rlx.models.hf import hf_tensors, load_params, read_architecture, save_params
from rlx.models.hf_config import architecture_config, parse_architecture, read_config
from rlx.models.rope import inverse_frequencies
from rlx.models.spec import count_parameters
from tests import tiny_tokenizer

FIXTURES, FULL = Path(__file__).parent.parent / "fixtures", Path(__file__).parents[2] / "configs" / "architectures"
STYLES = ["qwen3_moe", "olmo3", "deepseek_v3_k2like", "qwen3_5_text", "qwen3_5_moe_vl_hub", "olmo_hybrid_nope"]


def config_of(name: str, file: str = "config.json") -> dict:
    return json.loads((FIXTURES / name / file).read_text())


@pytest.mark.parametrize("name", STYLES)
def test_both_styles_say_the_same(name):
    new, old = (parse_architecture(config_of(name, f"config{style}.json")) for style in ("", ".legacy"))
    assert new.groups == old.groups
    assert hf_tensors(new) == hf_tensors(old)


@pytest.mark.parametrize("name", STYLES)
def test_a_saved_config_is_the_one_that_was_read(name):
    source = config_of(name)
    saved = architecture_config(parse_architecture(source), "bfloat16")
    assert (saved["dtype"], saved["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert {k: v for k, v in saved.items() if k not in ("dtype", "torch_dtype", "text_config")} == {
        k: v for k, v in source.items() if k not in ("dtype", "text_config")
    }
    assert parse_architecture(saved) == parse_architecture(source)


@pytest.mark.parametrize(
    "name, published",
    [
        ("qwen3_8b", 8_190_735_360),
        ("qwen2_5_7b", 7_615_616_512),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_next_80b_a3b", 79_674_391_296),
        ("qwen3_6_35b_a3b", 34_660_610_688),
        ("kimi_k2", 1_026_408_232_448),
        ("kimi_linear_48b_a3b", 49_122_681_728),
        # A_log has 128 entries for 96 heads in each of 69 layers
        ("kimi_k3", 2_779_484_476_000 + 69 * 32),
        ("olmo3_7b", 7_298_011_136),
        ("olmo_hybrid_7b", 7_430_870_688),
    ],
)
def test_published_sizes(name, published):
    assert count_parameters(read_config(FULL / name)) == published


def test_layers_that_repeat_are_stacked():
    """Kimi K2: a dense layer, then 60 of experts. Qwen3.6: ten times three recurrent layers and one of attention."""
    k2, qwen = read_config(FULL / "kimi_k2"), read_config(FULL / "qwen3_6_35b_a3b")
    assert [(len(g.pattern), g.repeats) for g in k2.groups] == [(1, 1), (1, 60)]
    assert [(len(g.pattern), g.repeats) for g in qwen.groups] == [(4, 10)]
    assert [slot.numbers[:2] for slot in slots(qwen)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert sorted(n for slot in slots(read_config(FULL / "kimi_k3")) for n in slot.numbers) == list(range(93))
    a, b, c = (Mlp(width) for width in (1, 2, 3))
    assert [(g.pattern, g.repeats) for g in grouped((a, b, c))] == [((a, b, c), 1)]
    assert [(g.pattern, g.repeats) for g in grouped((c, a, b, a, b, a))] == [((c,), 1), ((a, b), 2), ((a,), 1)]


def test_olmo3_slides_and_stretches_only_where_its_layers_say_so():
    arch = parse_architecture(config_of("olmo3"))
    mixers = [layer.mixer for layer in arch.layers]
    assert [m.window for m in mixers] == [16, 16, 16, None]
    assert [m.rope.yarn is None for m in mixers] == [True, True, True, False]
    assert mixers[3].rope.yarn.table_scale == pytest.approx(1.2079441541679836)
    assert {layer.norms for layer in arch.layers} == {"post"}


def test_olmo2_is_olmo3_that_sees_everything():
    config = config_of("olmo3") | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    config |= {"layer_types": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    arch = parse_architecture(config)
    mixer = Attention(4, 2, 16, Rope(5e5, 16), norm="width")
    assert {layer.mixer for layer in arch.layers} == {mixer}
    assert len(arch.groups) == 1
    assert set(hf_tensors(arch)) == set(hf_tensors(parse_architecture(config_of("olmo3"))))


def test_olmoe():
    config = config_of("qwen3_moe") | {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}
    config |= {"num_experts": 8, "intermediate_size": 32, "norm_topk_prob": False, "head_dim": 16}
    arch = parse_architecture(config)
    assert not arch.layers[0].mlp.router.normalise
    assert arch.layers[0].mixer.norm == "width"
    tensors = hf_tensors(arch)
    assert tensors["model.layers.1.self_attn.q_norm.weight"].shape == (64,)
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (64, 32)


def test_deepseek_v3():
    config = config_of("deepseek_v3_k2like")
    arch = parse_architecture(config)
    mixer, experts = arch.layers[1].mixer, arch.layers[1].mlp
    assert isinstance(mixer, LatentAttention)
    assert isinstance(arch.layers[0].mlp, Mlp)
    assert isinstance(experts, Experts)
    # both mscales are 1: cos and sin as they are, the scores times the square of what one alone would give
    assert mixer.rope.yarn.table_scale == 1
    assert mixer.scale == pytest.approx(24**-0.5 * (0.1 * np.log(32) + 1) ** 2)
    assert (experts.router.scoring, experts.router.scale, experts.router.groups) == ("sigmoid", 2.827, 1)
    grouped_router = parse_architecture(config | {"n_group": 4, "topk_group": 2}).layers[1].mlp.router
    assert (grouped_router.groups, grouped_router.top_groups) == (4, 2)
    with pytest.raises(ValueError, match="num_experts_per_tok 3 of n_routed_experts 8 cannot come from 1 of 4 groups"):
        parse_architecture(config | {"n_group": 4, "topk_group": 1})


def test_a_tower_in_a_larger_checkpoint():
    """Kimi K2.5 and 2.6: the language model is one part, its tensors under a prefix."""
    text = config_of("deepseek_v3_k2like", "config.legacy.json")
    outer = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    arch = parse_architecture(outer)
    assert arch.groups == parse_architecture(text).groups


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is not given"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias True"),
        ("deepseek_v3_k2like", {"scoring_func": "softmax"}, "only sigmoid"),
        ("deepseek_v3_k2like", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers is 4"),
        ("olmo3", {"layer_types": ["linear_attention"] * 4}, "only sliding_attention and full_attention layers"),
        ("olmo3", {"sliding_window": None}, "sliding_window is not given"),
    ],
)
def test_what_is_not_implemented_is_refused(name, change, said):
    with pytest.raises(ValueError, match=said):
        parse_architecture(config_of(name) | change)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """K2's numbers by the formula: the turning points of 1 and 1 turns in 4,096 positions."""
    rope = read_config(FULL / "kimi_k2").layers[0].mixer.rope
    plain = rope.theta ** -(np.arange(32) / 32)
    turns = 4096 * plain / (2 * np.pi)
    found = inverse_frequencies(rope)
    np.testing.assert_allclose(found[turns > 2], plain[turns > 2], rtol=1e-12)
    np.testing.assert_allclose(found[turns < 0.5], plain[turns < 0.5] / 32, rtol=1e-12)


def test_layers_that_predict_further_tokens_go_along_with_a_saved_model(tmp_path):
    """config.json announces them, so a server asks for them; those in 4 bits are written as what they stand for."""
    source = shutil.copytree(FIXTURES / "deepseek_v3_k2like", tmp_path / "source")
    tiny_tokenizer.build(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(source / "model.safetensors")
    layer = f"model.layers.{config['num_hidden_layers']}"
    packed, scale = np.full((2, 32), 0x2A, np.uint8), np.full((2, 2), 127, np.uint8)
    further = {
        f"{layer}.eh_proj.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "mtp.fc.weight": np.ones((2, 2)),
    }
    stored = {f"{layer}.mlp.up_proj.weight_packed": packed, f"{layer}.mlp.up_proj.weight_scale": scale}
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(tensors | further | stored | constant, source / "model.safetensors")
    arch = read_architecture(source)
    save_params(tmp_path / "saved", arch, load_params(source, arch), "float32", tokenizer_from=source)
    saved = {n: a for file in (tmp_path / "saved").glob("*.safetensors") for n, a in load_file(file).items()}
    unpacked = {f"{layer}.mlp.up_proj.weight": mxfp4.dequantise(packed, scale)}
    assert saved.keys() == {*tensors, *further, *unpacked}
    for name, array in (further | unpacked).items():
        np.testing.assert_array_equal(saved[name], array)


def test_other_towers_go_along_with_a_saved_model(tmp_path):
    """config.json describes them too, so a server asks for them."""
    source = shutil.copytree(FIXTURES / "qwen3_5_moe_vl_hub", tmp_path / "source")
    tiny_tokenizer.build(source)
    arch = read_architecture(source)
    save_params(tmp_path / "saved", arch, load_params(source, arch), "float32", tokenizer_from=source)
    weight_map = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(source / "model.safetensors", framework="np") as stored:
        assert set(weight_map) == set(stored.keys())
        for name, file in weight_map.items():
            with safe_open(tmp_path / "saved" / file, framework="np") as saved:
                np.testing.assert_array_equal(saved.get_tensor(name), stored.get_tensor(name))
    again = read_architecture(tmp_path / "saved")
    assert again == arch
    np.testing.assert_array_equal(load_params(tmp_path / "saved", again)["embed"], load_params(source, arch)["embed"])
