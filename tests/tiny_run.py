"""A whole run in seconds: a tiny random model that likes digits, tasks whose answer is a digit, `configs/tiny.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from tokenizers.pre_tokenizers import ByteLevel

from rlx import assemble
from rlx.checkpoint import Checkpoints, Restored
from rlx.config.flags import config_from_argv
from rlx.config.schema import Config
from rlx.learner.state import LearnerState, init_state, make_optimizer
from rlx.models.hf import save_params
from tests import tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
from configs import base, tiny

def get_config():
    c = tiny.get_config()
    c.run.directory = {runs!r}
    c.run.compilation_cache = ""  # jax's own, set by the environment
    c.model.path = {model!r}
    c.tasks.sources = {{"digits": base.source(path={tasks!r})}}
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 4
    c.engine.steps_per_dispatch = 1
    c.grader.timeout_s = 200.0  # a busy machine stands still for seconds, and two runs would differ
    return c
"""


def digit_model(directory: Path, likely: str = "37") -> str:
    """The tiny model, but it mostly writes one of a few characters and ends: otherwise hardly a response could pass.

    A direction that all embeddings share, so that every hidden state has it, is longer in those of these tokens; the
    tied head then prefers them.
    """
    params = tiny_model.params()
    embed = np.array(params["embed"])
    shared = np.sign(np.random.default_rng(0).normal(size=embed.shape[1]))
    vocabulary = (*tiny_tokenizer.SPECIAL, *sorted(ByteLevel.alphabet()))
    embed += shared
    embed[[vocabulary.index(character) for character in likely]] += 0.6 * shared
    embed[tiny_tokenizer.IM_END] += 0.7 * shared
    save_params(directory, tiny_model.ARCH, {**params, "embed": embed}, "float32")
    return tiny_tokenizer.build(directory)


def write_jsonl(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def digit_tasks(path: Path, answers: str = "37") -> str:
    """Forty questions, each answered by one of the digits."""
    return write_jsonl(path, [{"question": f"Digit {i}?", "answer": answers[i % len(answers)]} for i in range(40)])


def write(directory: Path) -> Path:
    """The model, the tasks and the recipe in `directory`; runs go to `directory`/runs. Returns the recipe."""
    model = digit_model(directory / "model")
    tasks = digit_tasks(directory / "tasks.jsonl")
    recipe = directory / "recipe.py"
    recipe.write_text(RECIPE.format(runs=str(directory / "runs"), model=model, tasks=tasks), encoding="utf-8")
    return recipe


def arguments(recipe: Path, **changes: Any) -> list[str]:
    """The command line of a recipe with changes of its keys; `__` in a name stands for the dot."""
    return [f"--config={recipe}", *(f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items())]


def config(recipe: Path, **changes: Any) -> Config:
    return config_from_argv(["rlx", *arguments(recipe, **changes)], flags.FlagValues())


def start(*command: str) -> subprocess.Popen[str]:
    """`python -m COMMAND` as a process that imports the project from this checkout, its output in pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(path: Path) -> list[dict[str, Any]]:
    # A line ends with a newline only: a random model writes other characters that str.splitlines takes for an end.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def samples(run: Path) -> list[dict[str, Any]]:
    """samples.jsonl of a run without the one thing in it that is never the same twice."""
    return [
        r | {"grade": {k: v for k, v in r["grade"].items() if k != "seconds"}} for r in records(run / "samples.jsonl")
    ]


def fresh_state(config: Config, model: assemble.Model) -> LearnerState:
    return init_state(model.arch, config.lora, model.params, make_optimizer(config.learner), jax.random.key(0))


def newest_checkpoint(config: Config) -> tuple[assemble.Model, Restored]:
    model = assemble.load_model(config)
    checkpoints = Checkpoints(Path(config.run.directory) / config.run.name / "checkpoints", keep=None)
    restored = checkpoints.restore(fresh_state(config, model))
    checkpoints.close()
    return model, restored
