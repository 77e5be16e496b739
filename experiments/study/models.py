"""The study's models and tasks: a tokenizer of bytes, random weights, questions about digits, noisy answers to learn.

A question is five digits; the answer is the largest and then the smallest. The examples that a base model is made from
give each digit wrong in a share of the cases, so it knows the answer and often writes another: what is left for RL.
"""

from __future__ import annotations

import itertools
import json
import random
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
DIGITS, NOISE = 5, 0.35
QUESTIONS, EXAMPLES = 1500, 6000

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "target": ("qwen3", {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "head_dim": 32}),
    "small": ("qwen3", {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "head_dim": 16}),
    "other": ("qwen2", {"hidden_size": 96, "intermediate_size": 256, "num_layers": 2, "head_dim": 24}),
}


def architecture(name: str) -> Architecture:
    """The target, a proxy of its family, and one of another family."""
    family, sizes = SIZES[name]
    more: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tied": True}
    return dense(family, vocab_size=256 + len(SPECIAL), max_positions=64, **sizes, **more)


def write_tokenizer(directory: Path) -> None:
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))


def write_random_model(directory: Path, name: str) -> int:
    """Random weights with the tokenizer; returns how many."""
    if not directory.exists():
        write_random(directory, architecture(name), tokenizer_from=None, seed=1, scale=0.08)
        write_tokenizer(directory)
    return count_parameters(architecture(name))


def write_tasks(directory: Path) -> None:
    """tasks.jsonl, and examples.jsonl of other questions with noisy answers."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    questions = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    rng.shuffle(questions)
    tasks = [{"question": q, "answer": answer(q), "grader": "exact"} for q in questions[:QUESTIONS]]
    others = questions[QUESTIONS : QUESTIONS + EXAMPLES]
    examples = [{"question": q, "response": noisy(answer(q), rng)} for q in others]
    for name, rows in (("tasks", tasks), ("examples", examples)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer(question: str) -> str:
    return max(question) + min(question)


def noisy(text: str, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if rng.random() < NOISE else digit for digit in text)
