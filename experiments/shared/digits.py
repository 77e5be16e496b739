"""What studies of questions about five digits share: a tokenizer of bytes, small random models, noisy answers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rlx.models.presets import dense, write_random
from rlx.models.spec import Architecture, count_parameters

SPECIAL = ("<|endoftext|>", "<|ask|>", "<|answer|>", "<|pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|ask|>{{ m['content'] }}{% elif m['role'] == 'assistant' %}"
)
TEMPLATE += (
    "{{ m['content'] }}<|endoftext|>{% endif %}{% if loop.last and add_generation_prompt or m['role'] == 'user' %}"
)
TEMPLATE += "<|answer|>{% endif %}{% endfor %}"
DIGITS, QUESTIONS, EXAMPLES = 5, 1500, 6000


def architecture(family: str, dimensions: dict[str, int]) -> Architecture:
    more: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tied": True}
    return dense(family, vocab_size=256 + len(SPECIAL), max_positions=64, **dimensions, **more)


def write_tokenizer(directory: Path) -> None:
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))


def write_random_model(directory: Path, arch: Architecture) -> int:
    """Random weights with the tokenizer; returns how many."""
    if not directory.exists():
        write_random(directory, arch, tokenizer_from=None, seed=1, scale=0.08)
        write_tokenizer(directory)
    return count_parameters(arch)


def draw_questions(rng: random.Random) -> tuple[list[str], list[str]]:
    """Those of the tasks, and others for the examples."""
    questions = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    rng.shuffle(questions)
    return questions[:QUESTIONS], questions[QUESTIONS : QUESTIONS + EXAMPLES]


def noisy(text: str, noise: float, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if rng.random() < noise else digit for digit in text)


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
