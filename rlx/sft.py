"""Supervised fine-tuning on JSONL of {"question", "response"}: a cold start before RL, or a model of its own.

    rlx sft --config=configs/quickstart.py --config.sft.path=examples.jsonl --config.sft.steps=50

It is the learner's own update: the negative log-likelihood is the REINFORCE loss with advantage 1 at every response
token, its mean over the tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from rlx import assemble, cli
from rlx.config.flags import config_or_exit
from rlx.config.objective import ObjectiveConfig
from rlx.config.schema import Config
from rlx.data.packing import Trajectory, pack
from rlx.envs.chat import ChatTokenizer
from rlx.envs.extract import normalise_text
from rlx.envs.tasks import build_tasks
from rlx.export import write_merged
from rlx.learner.state import LearnerState, make_optimizer
from rlx.learner.step import update
from rlx.parallel import runtime
from rlx.run import Run
from rlx.types import Task

Report = Callable[[int, dict[str, float]], None]


def read_examples(
    path: str, tokenizer: ChatTokenizer, row_tokens: int, held_out: Iterable[Task] = ()
) -> list[Trajectory]:
    """The examples of a JSONL file, tokenised.

    Raises ValueError with file, line and what is wrong there; a question of the held-out tasks is wrong, too: what an
    evaluation asks must not have been taught.
    """
    asked = {normalise_text(task.question) for task in held_out}
    examples = []
    # A line ends with a newline only: JSON may hold other characters that str.splitlines takes for an end.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        found = [record.get(k) for k in ("question", "response")] if isinstance(record, dict) else []
        texts = [text for text in found if isinstance(text, str) and text]
        if len(texts) < 2:
            raise ValueError(f'{where}: must be {{"question": TEXT, "response": TEXT}}, none of them empty')
        if normalise_text(texts[0]) in asked:
            raise ValueError(f"{where}: the question {texts[0]!r} is one of the held-out tasks; remove the example")
        tokens, mask = tokenizer.encode_example(*texts)
        if len(tokens) > row_tokens:
            raise ValueError(f"{where}: {len(tokens)} tokens; learner.row_tokens holds {row_tokens}")
        zeros = np.zeros(len(tokens), np.float32)
        examples.append(Trajectory(tokens, mask, 1.0, zeros, zeros.astype(np.int32), None))
    if not examples:
        raise ValueError(f"{path}: no examples in it")
    return examples


def sft_examples(config: Config, model: assemble.Model, held_out: Iterable[Task] = ()) -> list[Trajectory]:
    """The examples of `config.sft`; none where it has no steps. Raises what `read_examples` does."""
    if not config.sft.steps:
        return []
    return read_examples(config.sft.path, model.tokenizer, config.learner.row_tokens, held_out)


def supervise(
    config: Config,
    model: assemble.Model,
    examples: list[Trajectory],
    state: LearnerState,
    report: Report,
    check: Callable[[], None],
) -> LearnerState:
    """The learner's state after `config.sft.steps` optimizer steps from `state`, with its own optimizer and versions.

    `report` gets each step's metrics; `check` is called between steps and may raise.
    """
    batch_size = min(config.sft.batch_size, len(examples))
    learner = dataclasses.replace(
        config.learner,
        learning_rate=config.sft.learning_rate,
        updates=config.sft.steps,
        schedule="constant",
        warmup_updates=0,
        row_targets=0,
    )
    config = dataclasses.replace(config, learner=learner, objective=_likelihood(config))
    step = dataclasses.replace(assemble.step_config(config, model.arch, batch_size), temperature=1.0)
    # Responses may be as long as a row, so at worst each has one of its own.
    capacity = -(-batch_size // learner.micro_batch_rows)
    packing = dataclasses.replace(assemble.packing_config(config, batch_size, 0), capacity=capacity)
    optimizer = make_optimizer(learner)
    order = _batches(len(examples), batch_size, config.run.seed)
    state = dataclasses.replace(state, optimizer=optimizer.init(state.trainable))
    for i in range(config.sft.steps):
        check()
        packed = pack([examples[j] for j in next(order)], packing)
        state, scalars, _ = update(step, optimizer, state, model.params, assemble.device_batch(packed))
        scalars = jax.device_get(scalars)
        if not scalars["finite"]:
            raise ValueError(f"supervised step {i + 1}: loss or gradient is not finite; lower sft.learning_rate")
        report(
            i + 1,
            {
                "sft/loss": float(scalars["loss"]),
                "sft/grad_norm": float(scalars["grad_norm"]),
                "sft/learning_rate": learner.learning_rate,
            },
        )
    return state


def cold_start(run: Run, examples: list[Trajectory]) -> None:
    """Move the run's policy by supervised steps before its first update; it is version 0 still."""
    with run.timers("sft"):
        state = supervise(run.config, run.model, examples, run.state, run.recorder.sft, run.preemption.check)
    zero = jnp.zeros((), jnp.int32)
    run.state = dataclasses.replace(state, version=zero, optimizer=run.optimizer.init(state.trainable))


def _likelihood(config: Config) -> ObjectiveConfig:
    """The run's objective with everything off but the log-likelihood."""
    distill = dataclasses.replace(config.objective.distill, form="off")
    return dataclasses.replace(
        config.objective,
        loss="reinforce",
        centering="off",
        aggregation="token_mean",
        sequence_mask="off",
        entropy_coefficient=0.0,
        kl_coefficient=0.0,
        distill=distill,
    )


def _batches(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches of indices, each epoch in a new order; a batch never has an index twice."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]


def main(argv: list[str] | None = None) -> int:
    """`rlx sft`: tunes the model and writes it to <run.directory>/<run.name>/sft as a Hugging Face directory."""
    argv = sys.argv if argv is None else argv
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    directory = config.run.path / "sft"
    if not config.sft.steps:
        print("rlx sft: config.sft.steps = 0: nothing to do; give --config.sft.steps=50", file=sys.stderr)
        return 2
    if directory.exists():
        print(f"rlx sft: {directory} exists; choose another --config.run.name or remove it", file=sys.stderr)
        return 2
    runtime.use_compilation_cache(config.run.compilation_cache)
    model = assemble.load_model(config)
    _, held_out = build_tasks(config.tasks)
    examples = sft_examples(config, model, held_out)
    state = assemble.fresh_state(config, model)
    with tqdm(total=config.sft.steps, desc="sft") as bar:

        def report(step: int, scalars: dict[str, float]) -> None:
            bar.set_postfix_str(f"loss {scalars['sft/loss']:.3f}")
            bar.update()

        state = supervise(config, model, examples, state, report, lambda: None)
    write_merged(config, model, state, directory)
    print(f"the tuned model is in {directory}: train it with --config.model.path={directory}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("sft", sys.argv[1:]))
