"""Hugging Face checkpoints: config.json of both styles, names, loading, saving, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from rlx.models.hf import hf_tensors, load_params, read_architecture, save_params, to_hf
from rlx.models.hf_config import architecture_config, parse_architecture
from rlx.models.presets import dense
from rlx.models.spec import param_specs

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ["qwen2", "qwen3", "qwen3_tied"]

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tied": False,
    "max_positions": 4096,
}
QWEN3 = dense("qwen3", **SIZES)
ARCHITECTURES = {
    "qwen2": dense("qwen2", **SIZES | {"head_dim": 16}),
    "qwen3": QWEN3,
    "qwen3_tied": dense("qwen3", **SIZES | {"tied": True}),
}


def config_of(name: str, file: str = "config.json") -> dict:
    return json.loads((FIXTURES / name / file).read_text())


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a fixture whose tensors were changed by `edit`."""

    def make(name: str, edit=lambda tensors: None) -> Path:
        directory = tmp_path / name
        shutil.copytree(FIXTURES / name, directory)
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


# ---------------------------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize("file", ["config.json", "config.legacy.json"])
@pytest.mark.parametrize("name", NAMES)
def test_both_styles_of_config(name, file):
    assert parse_architecture(config_of(name, file)) == ARCHITECTURES[name]


@pytest.mark.parametrize("name", NAMES)
def test_written_config_is_read_by_transformers_and_by_us(name, tmp_path):
    sizes = SIZES | {"rope_theta": 12345.0, "tied": ARCHITECTURES[name].tied}
    arch = dense(ARCHITECTURES[name].model_type, **sizes)
    (tmp_path / "config.json").write_text(json.dumps(architecture_config(arch, "bfloat16")))
    assert read_architecture(tmp_path) == arch
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == arch.model_type
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 12345.0}
    assert theirs.head_dim == arch.layers[0].mixer.head_dim
    assert theirs.num_key_value_heads == arch.layers[0].mixer.kv_heads
    assert theirs.tie_word_embeddings == arch.tied
    assert set(theirs.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("qwen3", {"model_type": "qwen3_mo"}, "nearest is 'qwen3_moe'"),
        ("qwen3", {"model_type": None}, "model_type None is not supported"),
        ("qwen3", {"hidden_act": "gelu"}, "only silu"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("qwen2", {"attention_bias": False}, "write zeros"),
        ("qwen3", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e6}}, "'longrope'"),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type 'linear'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differs between kinds of layers"),
        ("qwen3", {"rope_theta": 5e6}, r"contradictory values of rope_theta: \[1000000.0, 5000000.0\]"),
        ("qwen3", {"rope_parameters": None}, "rope_theta is not given"),
        ("qwen3", {"partial_rotary_factor": 0.1}, "head_dim 32 is odd, or becomes 3"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "only MXFP4 weights"),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "only Qwen3ForCausalLM"),
        ("qwen3", {"head_dim": None}, "head_dim is not given"),
        ("qwen3", {"head_dim": 31}, "head_dim 31 is odd"),
        ("qwen3", {"tie_word_embeddings": None}, "tie_word_embeddings is not given"),
        ("qwen3", {"num_key_value_heads": 3}, "not a multiple"),
        ("qwen2", {"hidden_size": 66}, "hidden_size 66 is not a multiple"),
        ("qwen3", {"vocab_size": "384"}, "vocab_size '384' is not a positive whole number"),
    ],
)
def test_unsupported_config_is_refused_with_the_reason(name, change, said):
    with pytest.raises(ValueError, match=said):
        parse_architecture(config_of(name) | change)


def test_config_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="model directory is expected"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config.json holds a JSON list"):
        read_architecture(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_the_checkpoints(name):
    stored = json.loads((FIXTURES / name / "meta.json").read_text())["tensors"]
    ours = {tensor: list(place.shape) for tensor, place in hf_tensors(ARCHITECTURES[name]).items()}
    assert ours == {tensor: shape for tensor, (_, shape) in stored.items()}


@pytest.mark.parametrize("library", [np.asarray, jnp.asarray])
def test_to_hf_undoes_loading(library):
    params = jax.tree.map(library, load_params(FIXTURES / "qwen2", ARCHITECTURES["qwen2"]))
    stored = load_file(FIXTURES / "qwen2" / "model.safetensors")
    sent = dict(to_hf(ARCHITECTURES["qwen2"], params))
    assert sent.keys() == stored.keys()
    for tensor, array in sent.items():
        assert isinstance(array, jax.Array) == (library is jnp.asarray)
        np.testing.assert_array_equal(array, stored[tensor])


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", NAMES)
def test_loaded_tree_has_the_specified_shapes(name):
    arch = ARCHITECTURES[name]
    loaded = traverse_util.flatten_dict(load_params(FIXTURES / name, arch, "bfloat16"))
    specs = traverse_util.flatten_dict(param_specs(arch))
    assert {path: leaf.shape for path, leaf in loaded.items()} == {path: spec.shape for path, spec in specs.items()}
    assert {leaf.dtype for leaf in loaded.values()} == {jnp.dtype("bfloat16")}


def test_kernels_are_transposed_and_stacked():
    params = load_params(FIXTURES / "qwen3", QWEN3)
    stored = load_file(FIXTURES / "qwen3" / "model.safetensors")
    mixer = params["layers"]["0"]["mixer"]
    np.testing.assert_array_equal(mixer["o_proj"]["kernel"][1], stored["model.layers.1.self_attn.o_proj.weight"].T)
    np.testing.assert_array_equal(mixer["k_norm"][0], stored["model.layers.0.self_attn.k_norm.weight"])
    np.testing.assert_array_equal(params["head"], stored["lm_head.weight"])


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read(checkpoint, stored):
    def halve(tensors):
        tensors.update({name: array.astype(stored) for name, array in tensors.items()})

    params = load_params(checkpoint("qwen2", halve), ARCHITECTURES["qwen2"], "float32")
    whole = load_file(FIXTURES / "qwen2" / "model.safetensors")["model.norm.weight"]
    assert params["final_norm"].dtype == np.float32
    np.testing.assert_array_equal(params["final_norm"], whole.astype(stored).astype(np.float32))


def remove(tensor):
    return lambda tensors: tensors.pop(tensor)


def put(tensor, array):
    return lambda tensors: tensors.update({tensor: array})


@pytest.mark.parametrize(
    "edit, said",
    [
        (remove("lm_head.weight"), "lacks 1 tensors: lm_head.weight"),
        (put("model.layers.0.self_attn.o_proj.bias", np.zeros(64, np.float32)), "unexpected 1 tensors: .*o_proj.bias"),
        (put("model.norm.weight", np.zeros(63, np.float32)), r"model.norm.weight has shape \(63,\).*makes it \(64,\)"),
        (put("model.norm.weight", np.zeros(64, np.int8)), "model.norm.weight is stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, edit, said):
    with pytest.raises(ValueError, match=said):
        load_params(checkpoint("qwen3", edit), QWEN3)


def test_constants_of_older_exports_are_ignored(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert "embed" in load_params(checkpoint("qwen3", put(name, np.zeros(16, np.float32))), QWEN3)


def test_tied_head_in_the_file_must_equal_the_embedding(checkpoint):
    arch = ARCHITECTURES["qwen3_tied"]
    embedding = load_file(FIXTURES / "qwen3_tied" / "model.safetensors")["model.embed_tokens.weight"]
    directory = checkpoint("qwen3_tied", put("lm_head.weight", embedding))
    assert "head" not in load_params(directory, arch)
    shutil.rmtree(directory)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_params(checkpoint("qwen3_tied", put("lm_head.weight", embedding + 1)), arch)


def test_missing_and_damaged_files_are_named(checkpoint):
    directory = checkpoint("qwen3")
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_params(directory, QWEN3)
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load_params(directory, QWEN3)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        load_params(directory, QWEN3)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        load_params(directory, QWEN3)


# --------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("name", NAMES)
def test_saved_model_is_the_same_model(name, tmp_path):
    arch = ARCHITECTURES[name]
    params = load_params(FIXTURES / name, arch)
    save_params(tmp_path / "out", arch, jax.tree.map(jnp.asarray, params), "float32")
    assert read_architecture(tmp_path / "out") == arch
    stored = load_file(FIXTURES / name / "model.safetensors")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == stored.keys()
    for tensor in stored:
        np.testing.assert_array_equal(saved[tensor], stored[tensor])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_and_their_index(tmp_path):
    limit = 100_000
    params = load_params(FIXTURES / "qwen2", ARCHITECTURES["qwen2"])
    save_params(tmp_path / "out", ARCHITECTURES["qwen2"], params, "bfloat16", shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(shards) > 1
    assert {name: file for file, tensors in shards.items() for name in tensors} == index["weight_map"]
    sizes = [sum(array.nbytes for array in tensors.values()) for tensors in shards.values()]
    assert max(sizes) <= limit
    assert sum(sizes) == index["metadata"]["total_size"] == 2 * 111168
    again = load_params(tmp_path / "out", ARCHITECTURES["qwen2"])
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_tokenizer_and_token_ids_go_along(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(FIXTURES / "qwen3", base)
    params = load_params(base, QWEN3)
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        save_params(tmp_path / "out", QWEN3, params, tokenizer_from=base)
    (base / "tokenizer.json").write_text("{}")
    (base / "tokenization_own.py").write_text("")
    save_params(tmp_path / "out", QWEN3, params, tokenizer_from=base)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tokenizer = {"tokenizer.json", "tokenization_own.py", "generation_config.json"}
    assert names == tokenizer | {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2


def test_saving_is_whole_or_not_at_all(tmp_path):
    params = load_params(FIXTURES / "qwen3", QWEN3)
    broken = {name: leaf for name, leaf in params.items() if name != "head"}
    with pytest.raises(KeyError, match="head"):
        save_params(tmp_path / "out", QWEN3, broken)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="remove it"):
        save_params(tmp_path / "out", QWEN3, params)
