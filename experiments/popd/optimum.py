"""Where each lambda leads in the end: the pass rate of pi_ref (expert / base)^(1 / lambda) itself, without training.

python -m experiments.popd.optimum        experiments/popd/optima.csv, of the models that experiments.popd.run made

On the held-out questions of the runs, 4 attempts at each. At every token the three models' log-probs are
added, and the next one is drawn from what comes out.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from configs.rl import HOME
from experiments.popd.run import LAMBDAS, POPD, SEEDS
from rlx.config.flags import config_from_argv
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.tasks import build_tasks
from rlx.models import hf
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import forward, head_matrix

OPTIMA = Path("experiments/popd/optima.csv")
COLUMNS = ("proxy", "seed", "lambda", "pass_rate", "not_digits")
SMALLER = (0.01, 0.02)  # below what a run may have
ATTEMPTS = 4

Model = tuple[Architecture, Params]


def load(path: Path) -> Model:
    arch = hf.read_architecture(path)
    return arch, jax.tree.map(jnp.asarray, hf.load_params(path, arch))


def next_logprobs(model: Model, tokens: np.ndarray) -> np.ndarray:
    """float32 [rows, V] behind `tokens` [rows, t]."""
    return np.asarray(_next(model[0], model[1], jnp.asarray(tokens)))


@partial(jax.jit, static_argnums=0)
def _next(arch: Architecture, params: Params, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(arch, params, tokens, positions, jnp.ones_like(tokens))
    return jax.nn.log_softmax(hidden[:, -1] @ head_matrix(params).T)


def drawn(parts: Sequence[tuple[Model, float]], prompts: np.ndarray, length: int, seed: int) -> np.ndarray:
    """int32 [rows, length] from the product of models, each to its power."""
    rng, tokens = np.random.default_rng(seed), prompts
    for _ in range(length):
        logits = sum(power * next_logprobs(model, tokens) for model, power in parts)
        noise = rng.gumbel(size=logits.shape)  # type: ignore[union-attr]
        tokens = np.concatenate([tokens, np.argmax(logits + noise, -1)[:, None].astype(np.int32)], 1)
    return tokens[:, prompts.shape[1] :]


def measure(proxy: str, seed: int, target: Model, base: Model, lams: Sequence[float]) -> list[tuple[object, ...]]:
    tokenizer = load_chat_tokenizer(str(Path(HOME) / "target_base" / "sft"), "", "")
    # The held-out questions of the runs.
    config = config_from_argv(["optimum", f"--config={POPD}"], flags.FlagValues())
    tasks = [task for task in build_tasks(config.tasks)[1] for _ in range(ATTEMPTS)]
    answers = [str(task.answer) for task in tasks]
    prompts = np.stack([tokenizer.encode_prompt(task.question) for task in tasks])
    expert = load(Path(HOME) / f"{proxy}_expert_seed={seed}" / "model")
    rows: list[tuple[object, ...]] = []
    for lam in lams:
        parts = [(target, 1.0), (expert, 1 / lam), (base, -1 / lam)]
        written = drawn(parts, prompts, len(answers[0]) + 1, seed)
        texts = [tokenizer.decode(ids) for ids in written]
        ended = written[:, -1] == tokenizer.end_of_turn_id
        right = [text == answer and end for text, answer, end in zip(texts, answers, ended, strict=True)]
        strange = np.mean([not text[:5].isdigit() for text in texts])
        rows.append((proxy, seed, lam, round(float(np.mean(right)), 4), round(float(strange), 4)))
    return rows


def main() -> int:
    target, rows = load(Path(HOME) / "target_base" / "sft"), []
    for proxy, lams in LAMBDAS.items():
        base = load(Path(HOME) / f"{proxy}_base" / "sft")
        for seed in SEEDS:
            rows += measure(proxy, seed, target, base, (*SMALLER, *lams))
    with OPTIMA.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"wrote {OPTIMA}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
