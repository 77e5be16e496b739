"""A model of 0.2M parameters that knows how to call Python and seldom does, with the tasks it is trained on.

Its tokenizer is trained on its own examples. They show three ways to answer "What is 48 * 73?": a program and what it
prints, a program with a digit miscopied, and a guess. What works is for RL to find out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlx.envs.chat import CHATML
from rlx.envs.env import ToolCall
from rlx.envs.python_tool import PYTHON
from rlx.envs.tool_calls import describe_tools, write_call
from rlx.envs.tool_tasks import Arithmetic
from rlx.models.presets import dense, write_random
from rlx.models.spec import Architecture, count_parameters

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCABULARY = 384
KIND = Arithmetic(2, 2, "+*")
EXAMPLES = 6000
CALLS, MISCOPIED = 0.45, 0.25  # share of the examples that run a program, and of these that have a digit wrong


def architecture() -> Architecture:
    return dense(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tied=True,
        max_positions=256,
    )


def write_random_model(directory: Path, examples: Path) -> int:
    """Random weights with a tokenizer made for the examples; returns how many weights."""
    if not directory.exists():
        write_random(directory, architecture(), tokenizer_from=None, seed=1, scale=0.06)
        write_tokenizer(directory, examples)
    return count_parameters(architecture())


def write_tokenizer(directory: Path, examples: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = [json.loads(line) for line in examples.read_text().splitlines()]
    texts = [describe_tools("plain", (PYTHON,)), "system\n", "user\n", "assistant\n"] * 100
    tokenizer.train_from_iterator(
        [*texts, *(text for row in rows for text in (row["question"], *row["turns"]))], trainer
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))


def write_examples(path: Path) -> None:
    """Questions that are none of the tasks': those are drawn by another seed, and what both have is left out here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [example(random.Random(f"examples/{i}")) for i in range(EXAMPLES)]
    taken = {json.loads(line)["question"] for line in (path.parent / "tasks.jsonl").read_text().splitlines()}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["question"] not in taken))


def write_tasks(path: Path, count: int = 1200) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = [KIND.task(random.Random(f"tasks/{i}"))[:2] for i in range(count)]
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in dict(drawn).items()))


def example(rng: random.Random) -> dict[str, object]:
    question, answer, _ = KIND.task(rng)
    expression = question.removeprefix("What is ").removesuffix("?")
    if rng.random() >= CALLS:
        guess = "".join(rng.choice("0123456789") for _ in answer)
        turns = [f"It is {guess}."]
    else:
        if rng.random() < MISCOPIED:
            expression = miscopied(expression, rng)
        printed = str(eval(expression))  # digits and one operation, made above
        call = write_call("plain", ToolCall("python", {"code": f"print({expression})"}))
        turns = [call, printed, f"It is {printed}."]
    return {"question": question, "environment": "python_tool", "turns": turns}


def miscopied(text: str, rng: random.Random) -> str:
    at = rng.choice([i for i, c in enumerate(text) if c in "123456789"])
    return text[:at] + rng.choice("123456789".replace(text[at], "")) + text[at + 1 :]
