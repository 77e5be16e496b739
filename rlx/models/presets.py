"""Models without a download: architectures small enough for a test, with random weights.

    python -m rlx.models.presets models/tiny models/smollm2-135m-instruct
writes such a model with the tokenizer of another checkpoint; `configs/tiny.py` trains it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
from tokenizers import Tokenizer

from rlx.models import hf
from rlx.models.description import Architecture
from rlx.models.hf_config import parse_architecture
from rlx.models.spec import count_parameters, init_params


def dense(
    model_type: str,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_theta: float,
    rms_norm_eps: float,
    tied: bool,
    max_positions: int,
) -> Architecture:
    """A model of the family "qwen2" or "qwen3" in other sizes."""
    return parse_architecture(
        {
            "model_type": model_type,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rope_theta": rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "rms_norm_eps": rms_norm_eps,
            "tie_word_embeddings": tied,
            "max_position_embeddings": max_positions,
        }
    )


def tiny(vocab_size: int) -> Architecture:
    """Two blocks of Qwen3's kind, 32 wide, tied: 20,000 parameters and the embedding."""
    return dense(
        "qwen3",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tied=True,
        max_positions=1024,
    )


def write_random(
    directory: Path | str, arch: Architecture, *, tokenizer_from: Path | str | None, seed: int = 0, scale: float = 0.1
) -> None:
    """A Hugging Face directory of `arch` with float32 weights, normal with deviation `scale`; norms are 1, biases 0.

    Raises FileExistsError where `directory` exists, FileNotFoundError where `tokenizer_from` has no tokenizer.
    """
    params = init_params(arch, jax.random.key(seed), scale=scale)
    hf.save_params(directory, arch, params, "float32", tokenizer_from=tokenizer_from)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlx.models.presets", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the directory to write")
    parser.add_argument("tokenizer_from", type=Path, help="a model directory whose tokenizer goes along")
    arguments = parser.parse_args(argv)
    tokenizer = arguments.tokenizer_from / "tokenizer.json"
    if not tokenizer.is_file():
        print(f"error: {tokenizer} does not exist: name a model directory that has it", file=sys.stderr)
        return 1
    arch = tiny(Tokenizer.from_file(str(tokenizer)).get_vocab_size())
    try:
        write_random(arguments.out, arch, tokenizer_from=arguments.tokenizer_from)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {count_parameters(arch):,} random parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
