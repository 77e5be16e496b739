"""The tiny run with a tool: a tokenizer in which a whole program is one token, and a model that likes it and digits.

A response is a few of: the program (which prints 7), the digits 3 and 7, the end. So some call the tool, some answer,
some write a call that is none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from rlx.models.hf import save_params
from tests import tiny_model, tiny_run, tiny_tokenizer

PROGRAM = "```python\nprint(3 + 4)\n```"
PROGRAM_ID = tiny_tokenizer.VOCAB_SIZE
LIKED = {PROGRAM_ID: 0.7, tiny_tokenizer.IM_END: 0.6}
RECIPE = (
    tiny_run.RECIPE.rpartition("    return c")[0]
    + """\
    c.tasks.sources.digits.environment = "python_tool"
    c.tasks.held_out = 4
    c.tools.format = "plain"
    c.tools.max_turns = 3
    c.producer.session_token_limit = 240
    c.engine.context = 256
    c.engine.prefill_buckets = (192,)
    c.learner.row_tokens = 256
    c.learner.row_targets = 0
    c.rollout.group_size = 4
    c.eval.attempts_per_task = 1
    c.eval.k = (1,)
    return c
"""
)


def build_model(directory: Path, program: str = PROGRAM) -> str:
    arch = tiny_model.sized(vocab_size=tiny_tokenizer.VOCAB_SIZE + 1)
    params = tiny_model.params(arch=arch)
    embed = np.array(params["embed"])
    shared = np.sign(np.random.default_rng(0).normal(size=embed.shape[1]))
    embed += shared
    for token, more in {**LIKED, **dict.fromkeys(_digits(), 0.6)}.items():
        embed[token] += more * shared
    save_params(directory, arch, {**params, "embed": embed}, "float32")
    tiny_tokenizer.build(directory)
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken(program, special=False, normalized=False)])
    tokenizer.save(file)
    return str(directory)


def _digits() -> list[int]:
    vocabulary = (*tiny_tokenizer.SPECIAL, *sorted(ByteLevel.alphabet()))
    return [vocabulary.index(digit) for digit in "37"]


def write(directory: Path) -> Path:
    """The model, the tasks and the recipe in `directory`; runs go to `directory`/runs. Returns the recipe."""
    model = build_model(directory / "model")
    tasks = tiny_run.digit_tasks(directory / "tasks.jsonl")
    recipe = directory / "recipe.py"
    recipe.write_text(RECIPE.format(runs=str(directory / "runs"), model=model, tasks=tasks), encoding="utf-8")
    return recipe
