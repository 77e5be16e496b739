"""Models with recurrent layers: other layouts of the same weights, packed rows, cached decoding, adapters' updates."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from rlx.config.schema import EngineConfig, LoraConfig
from rlx.learner.state import init_state
from rlx.learner.step import update
from rlx.models import mxfp4
from rlx.models.files import read_json
from rlx.models.hf import load_params, read_architecture, save_params, to_hf
from rlx.models.hf_config import parse_architecture
from rlx.models.lora import linears, targets
from rlx.models.peft import load_adapter, save_adapter
from rlx.models.transformer import forward, logits
from tests import tiny_model
from tests.learner import batches
from tests.rollout.serving import ask, make_engine, serve

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = [
    *("qwen3_5_text", "qwen3_5_moe_vl_hub", "olmo_hybrid_nope", "kimi_linear", "kimi_k3"),
    *("qwen3_moe", "olmo3", "deepseek_v3_k2like"),
]
every_model = pytest.mark.parametrize("name", NAMES)
fast_for_one = pytest.mark.parametrize(
    "name", ["kimi_k3", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "kimi_k3")]
)


def loaded(directory):
    arch = read_architecture(directory)
    return arch, load_params(directory, arch)


def small(name):
    """The stored model's first and last layer with random weights: (architecture, parameters)."""
    config = read_json(FIXTURES / name / "config.json")
    tower = config.get("text_config") or config
    tower["num_hidden_layers"] = 2
    for key in ("layer_types", "mlp_layer_types"):
        if key in tower:
            tower[key] = [tower[key][0], tower[key][-1]]
    if "linear_attn_config" in tower:
        tower["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    if "attn_res_block_size" in tower:
        tower["attn_res_block_size"] = 1
    arch = parse_architecture(config)
    return arch, tiny_model.params(0, arch)


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def rewritten(tmp_path, name, config=lambda c: c, tensors=lambda t: t):
    """The stored model with another config.json and other tensors."""
    out = tmp_path / "model"
    shutil.copytree(FIXTURES / name, out)
    (out / "config.json").write_text(json.dumps(config(read_json(out / "config.json"))))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors(load_file(out / "model.safetensors")).items()},
        out / "model.safetensors",
    )
    return out


# ------------------------------------------------------------------------------------------------------------- layouts


@every_model
def test_saved_and_loaded_is_the_same_bytes_under_the_same_names(name, tmp_path):
    arch, params = loaded(FIXTURES / name)
    save_params(tmp_path / "once", arch, params, "float32")
    again, params_again = loaded(tmp_path / "once")
    same(params_again, params)
    save_params(tmp_path / "twice", again, params_again, "float32")
    first, second = (tmp_path / n / "model.safetensors" for n in ("once", "twice"))
    assert first.read_bytes() == second.read_bytes()
    source, saved = load_file(FIXTURES / name / "model.safetensors"), load_file(first)
    left_out = {n for n in source if n.startswith(("model.visual.", "mtp."))}
    assert saved.keys() == source.keys() - left_out
    for key, array in saved.items():
        np.testing.assert_array_equal(array, source[key], err_msg=key)


def grouped_by_key_head(tensors, heads=2, dim=16):
    """Qwen3.5's projections as Qwen3-Next stores them."""
    out = {}
    for name, array in tensors.items():
        part, end = name.rpartition("in_proj_")[::2]
        if end in ("z.weight", "a.weight"):
            continue
        if end == "qkv.weight":
            query, key, value = np.split(array, [heads * dim, 2 * heads * dim])
            rows = [x.reshape(heads, -1, 64) for x in (query, key, value, tensors[f"{part}in_proj_z.weight"])]
            out[f"{part}in_proj_qkvz.weight"] = np.concatenate(rows, axis=1).reshape(-1, 64)
        elif end == "b.weight":
            rows = [x.reshape(heads, -1, 64) for x in (array, tensors[f"{part}in_proj_a.weight"])]
            out[f"{part}in_proj_ba.weight"] = np.concatenate(rows, axis=1).reshape(-1, 64)
        else:
            out[name] = array
    return out


def test_qwen3_next_is_stored_with_its_projections_grouped(tmp_path):
    config = lambda c: c | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}  # noqa: E731
    path = rewritten(tmp_path, "qwen3_5_text", config, grouped_by_key_head)
    arch, params = loaded(path)
    assert {layer.mixer.form for layer in arch.layers[:3]} == {"grouped"}
    source, saved = load_file(path / "model.safetensors"), dict(to_hf(arch, params))
    same({name: np.asarray(array) for name, array in saved.items()}, source)


def test_experts_one_by_one_are_those_fused_on_the_hub(tmp_path):
    def apart(tensors):
        out = {}
        for name, array in tensors.items():
            plain = name.replace("model.language_model.", "model.")
            if ".experts." not in name:
                out[plain] = array
                continue
            base = plain.rpartition(".")[0]
            for e, matrix in enumerate(array):
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
                out |= {f"{base}.{e}.{part}.weight": x for part, x in parts.items()}
        return {name: x for name, x in out.items() if not name.startswith(("model.visual.", "mtp."))}

    path = rewritten(tmp_path, "qwen3_5_moe_vl_hub", lambda c: c["text_config"], apart)
    arch, params = loaded(path)
    assert arch.model_type == "qwen3_5_moe_text"
    same(params, loaded(FIXTURES / "qwen3_5_moe_vl_hub")[1])


def test_both_spellings_of_olmo_hybrids(tmp_path):
    """The newer one, and convolutions cut as wide as the projections that they follow."""
    swap = {
        "linear_attn.o_proj": "linear_attn.out_proj",
        "linear_attn.o_norm": "linear_attn.norm",
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    }

    def newer(tensors):
        out = {}
        for name, array in tensors.items():
            for old, new in swap.items():
                name = name.replace(old, new)
            out[name] = array
        for i in range(3):
            names = [f"model.layers.{i}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
            parts = np.split(np.concatenate([out[n] for n in names]), [48, 96])
            out |= dict(zip(names, parts, strict=True))
        return out

    arch, params = loaded(rewritten(tmp_path, "olmo_hybrid_nope", tensors=newer))
    same(params, loaded(FIXTURES / "olmo_hybrid_nope")[1])
    save_params(tmp_path / "saved", arch, params, "float32")
    assert (
        load_file(tmp_path / "saved" / "model.safetensors").keys()
        == load_file(tmp_path / "model" / "model.safetensors").keys()
    )


def test_experts_in_mxfp4_are_unpacked(tmp_path):
    """Loaded as what they stand for, and saved so: the bytes are no longer those of 4 bits."""
    rng, plain = np.random.default_rng(0), {}

    def quantised(tensors):
        out = {}
        for name, array in tensors.items():
            if ".experts." not in name:
                out[name] = array
                continue
            packed = rng.integers(0, 256, (array.shape[0], array.shape[1] // 2), dtype=np.uint8)
            scale = rng.integers(120, 128, (array.shape[0], array.shape[1] // 32), dtype=np.uint8)
            out |= {f"{name}_packed": packed, f"{name}_scale": scale}
            plain[name] = mxfp4.dequantise(packed, scale)
        return out

    stored = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    arch, params = loaded(rewritten(tmp_path, "kimi_k3", lambda c: c | stored, quantised))
    save_params(tmp_path / "saved", arch, params, "float32")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, array in plain.items():
        np.testing.assert_array_equal(saved[name], array)
    assert len(plain) == 4 * 8 * 3
    assert "quantization_config" not in read_json(tmp_path / "saved" / "config.json")
    same(loaded(tmp_path / "saved")[1], params)


def test_olmo_hybrids_rotate_only_where_a_base_is_given(tmp_path):
    for number, (change, rotates) in enumerate(
        [({}, True), ({"rope_parameters": None}, False), ({"rope_parameters": {"rope_theta": None}}, False)]
    ):
        arch = read_architecture(rewritten(tmp_path / str(number), "olmo_hybrid_nope", lambda c, x=change: c | x))
        assert [layer.mixer.rope is not None for layer in arch.layers[3:]] == [rotates]


# --------------------------------------------------------------------------------------------------------- packed rows


LENGTHS = (37, 5, 40)  # a document ends inside a chunk of 64 tokens, and one reaches over its end


@partial(jax.jit, static_argnums=0)
def value_and_gradient(arch, params, tokens, positions, segments, mixing):
    def total(params):
        hidden = forward(arch, params, tokens, positions, segments)
        return (hidden * mixing).sum(), hidden

    return jax.grad(total, has_aux=True)(params)


@fast_for_one
def test_packed_rows_are_separate_sequences(name):
    """Value and gradient."""
    arch, params = small(name)
    rng, total = np.random.default_rng(0), sum(LENGTHS)
    shapes = {"packed": (1, total + 6), "apart": (len(LENGTHS), max(LENGTHS))}
    arrays = {key: [np.zeros(shape, np.int32) for _ in range(3)] for key, shape in shapes.items()}
    mixing = {key: np.zeros((*shape, arch.hidden_size), np.float32) for key, shape in shapes.items()}
    places = []
    for i, length in enumerate(LENGTHS):
        ids, weights = rng.integers(0, arch.vocab_size, length), rng.normal(size=(length, arch.hidden_size))
        here = {"packed": (0, slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1]))), "apart": (i, slice(0, length))}
        for key, place in here.items():
            for array, values in zip(arrays[key], (ids, np.arange(length), 9 - i), strict=True):
                array[place] = values
            mixing[key][place] = weights
        places.append(here)
    found = {key: jax.device_get(value_and_gradient(arch, params, *arrays[key], mixing[key])) for key in shapes}
    for here in places:
        packed, apart = (found[key][1][here[key]] for key in ("packed", "apart"))
        np.testing.assert_allclose(packed, apart, atol=2e-4 if name == "kimi_k3" else 5e-5)
    for x, y in zip(*(jax.tree.leaves(found[key][0]) for key in ("packed", "apart")), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-4 * max(np.abs(y).max(), 1e-3))


# --------------------------------------------------------------------------------------------------------- the engine


@partial(jax.jit, static_argnums=0)
def distributions(arch, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.log_softmax(logits(params, forward(arch, params, tokens, positions, jnp.ones_like(tokens))))


@pytest.mark.slow
@every_model
def test_cached_decoding_is_the_forward_pass(name):
    """Every candidate of every token, prompts shorter and longer than a bucket, slots used again; then with other
    weights."""
    arch, params = small(name)
    config = EngineConfig(
        "local", slots=3, context=40, prefill_buckets=(16,), prefill_rows=2, steps_per_dispatch=5, lanes=1
    )
    engine = make_engine(arch, params, config, head_size=arch.vocab_size)
    changed = jax.tree.map(lambda x: x * 1.05, params)
    for weights, version in ((params, 0), (changed, 1)):
        if version:
            asyncio.run(engine.load(weights, version))
        requests = [
            ask(i, length, samples, vocab=arch.vocab_size, new=12)
            for i, (length, samples) in enumerate([(3, 2), (16, 1), (21, 1), (1, 1)])
        ]
        written = [(r, c) for r, found in zip(requests, serve(engine, requests), strict=True) for c in found]
        tokens = np.zeros((len(written), 40), np.int32)
        for row, (request, completion) in zip(tokens, written, strict=True):
            row[: len(request.prompt) + 12] = np.concatenate([request.prompt, completion.tokens])
        wanted = np.asarray(distributions(arch, weights, jnp.asarray(tokens)))
        for rows, (request, completion) in zip(wanted, written, strict=True):
            rows = rows[len(request.prompt) - 1 : len(request.prompt) + 11]
            got = completion.head.logprobs
            np.testing.assert_allclose(got, np.take_along_axis(rows, completion.head.ids, 1), atol=2e-4)


# ------------------------------------------------------------------------------------------------------------ updates


@fast_for_one
def test_three_updates_of_adapters_on_every_kind_of_layer(name, tmp_path):
    """On every linear layer; the base is untouched, and what is exported is what was trained."""
    arch, params = small(name)
    frozen, base = params, jax.device_get(params)
    lora = LoraConfig(rank=2, alpha=4.0, targets=tuple(dict.fromkeys(linear.name for linear in linears(arch))))
    config = dataclasses.replace(batches.CENTRED, arch=arch, adapter_scale=2.0)
    state = init_state(arch, lora, frozen, optax.adam(1e-3), jax.random.key(0))
    before, batch = jax.device_get(state.trainable), batches.batch()
    for _ in range(3):
        state, scalars, _ = update(config, optax.adam(1e-3), state, frozen, batch)
        assert scalars["finite"]
        assert np.isfinite(scalars["loss"])
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, jax.device_get(state.trainable))
    assert all(jax.tree.leaves(moved))
    same(jax.device_get(frozen), base)
    save_adapter(tmp_path / "adapter", arch, state.trainable, lora, "base")
    again, settings = load_adapter(tmp_path / "adapter", arch)
    same(again, jax.device_get(state.trainable))
    assert {linear.name for linear in targets(arch, settings)} == set(lora.targets)
