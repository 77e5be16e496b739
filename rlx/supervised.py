"""Supervised steps: the learner's own update on examples, with a validation loss beside it.

The negative log-likelihood is the REINFORCE loss with advantage 1 at every response token, its mean over the tokens of
a batch. Examples are packed into rows, several in each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
import optax

from rlx import assemble
from rlx.config.objective import ObjectiveConfig
from rlx.config.schema import Config, LearnerConfig
from rlx.data.examples import digest, epoch_batches, full_batches, read_examples, split
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.learner.score import mean_loss
from rlx.learner.state import LearnerState, make_optimizer
from rlx.learner.step import StepConfig, update
from rlx.sessions.environments import conversations
from rlx.types import Task


class Examples(NamedTuple):
    training: list[Trajectory]
    validation: list[Trajectory]

    @property
    def digest(self) -> str:
        return digest([*self.training, *self.validation])


@dataclasses.dataclass
class Progress:
    """How far the steps are; JSON-able."""

    step: int = 0
    examples: int = 0  # trained on
    base_loss: float = math.inf  # of the validation examples before the first step, nats a token
    best_step: int = 0  # of the lowest validation loss, 0 = none yet
    best_loss: float = math.inf


class Hooks(NamedTuple):
    """What the caller does with the steps."""

    report: Callable[[int, dict[str, float]], None]  # a step's metrics; step 0 is before the first
    best: Callable[[int, LearnerState], None]  # the lowest validation loss so far; the state is only lent
    between: Callable[[LearnerState, Progress], None]  # before each step; may save, may raise


@dataclasses.dataclass(frozen=True)
class Job:
    """What the steps are compiled for."""

    learner: LearnerConfig
    step: StepConfig
    packing: PackingConfig
    optimizer: optax.GradientTransformation
    fill: bool  # batches fill the packing's rows; False: they have sft.batch_size examples


def read(config: Config, model: assemble.Model, held_out: Iterable[Task] = ()) -> Examples:
    """The examples that `config.sft` names, split. Raises what `read_examples` and `split` do."""
    sft, row_tokens, held_out = config.sft, config.learner.row_tokens, list(held_out)
    known = conversations(config, model.tokenizer)
    examples = read_examples(sft.path, model.tokenizer, row_tokens, held_out, known)
    if sft.validation_path:
        validation = read_examples(sft.validation_path, model.tokenizer, row_tokens, (), known)
        return Examples(examples, validation)
    return Examples(*split(examples, sft.validation_fraction, config.run.seed))


def prepare(config: Config, model: assemble.Model, examples: Examples) -> Job:
    """The learner's update with the likelihood as its objective and an optimizer of its own."""
    sft = config.sft
    learner = dataclasses.replace(
        config.learner,
        learning_rate=sft.learning_rate,
        updates=sft.steps,
        schedule="constant",
        warmup_updates=0,
        row_targets=0,
        row_samples=0,  # examples have no prompt in common
        row_prefix=0,
    )
    config = dataclasses.replace(config, learner=learner, objective=_likelihood(config))
    batch_size = min(sft.batch_size, len(examples.training))
    # Responses may be as long as a row, so at worst each example has one of its own.
    rows = sft.batch_rows or -(-batch_size // learner.micro_batch_rows) * learner.micro_batch_rows
    packing = dataclasses.replace(
        assemble.packing_config(config, batch_size, 0), capacity=rows // learner.micro_batch_rows
    )
    shortest = min(len(e.tokens) for e in (*examples.training, *examples.validation))
    most = rows * (learner.row_tokens // shortest)
    step = assemble.step_config(config, model.arch, most, model.placement)
    step = dataclasses.replace(step, temperature=1.0)
    return Job(learner, step, packing, make_optimizer(learner), fill=bool(sft.batch_rows))


def supervise(
    config: Config,
    model: assemble.Model,
    examples: Examples,
    state: LearnerState,
    progress: Progress,
    hooks: Hooks,
) -> LearnerState:
    """The learner's state after `config.sft.steps` optimizer steps; `state`, of `fresh` or restored, and `progress` say
    where they begin, and `progress` is kept up to date.

    Raises ValueError for a loss or gradient that is not finite.
    """
    job, sft = prepare(config, model, examples), config.sft
    batches = epoch_batches(
        examples.training,
        min(sft.batch_size, len(examples.training)),
        job.packing if job.fill else None,
        config.run.seed,
    )
    if not progress.step and examples.validation:
        before = _validation(job, model, state, examples.validation)
        progress.base_loss = before["sft/validation_loss"]
        hooks.report(0, before)
    first = True
    # A resumed run draws the batches that it has trained on again, and passes over them.
    for batch in itertools.islice(batches, progress.step, sft.steps):
        hooks.between(state, progress)
        state, scalars = _step(job, model, state, batch, timed=not first)
        first = False
        progress.step += 1
        progress.examples += len(batch)
        scalars["sft/epochs"] = progress.examples / len(examples.training)
        if examples.validation and (progress.step % sft.eval_every == 0 or progress.step == sft.steps):
            scalars |= _validation(job, model, state, examples.validation)
            if scalars["sft/validation_loss"] < progress.best_loss:
                progress.best_step, progress.best_loss = progress.step, scalars["sft/validation_loss"]
                hooks.best(progress.step, state)
        hooks.report(progress.step, scalars)
    return state


def fresh(config: Config, model: assemble.Model, examples: Examples, state: LearnerState) -> LearnerState:
    """`state` with the optimizer of the supervised steps at its start."""
    optimizer = prepare(config, model, examples).optimizer
    return dataclasses.replace(state, optimizer=assemble.fresh_optimizer(config, model, optimizer, state.trainable))


def _step(
    job: Job, model: assemble.Model, state: LearnerState, batch: list[Trajectory], *, timed: bool
) -> tuple[LearnerState, dict[str, float]]:
    """One optimizer step. The first one of a process is not timed: it compiles."""
    start = time.perf_counter()
    packed = pack(batch, job.packing)
    state, scalars, _ = update(
        job.step, job.optimizer, state, model.params, assemble.device_batch(packed, job.step.placement)
    )
    scalars = jax.device_get(scalars)
    seconds = time.perf_counter() - start
    if not scalars["finite"]:
        raise ValueError("a supervised step's loss or gradient is not finite; lower sft.learning_rate")
    values = {
        "sft/loss": float(scalars["loss"]),
        "sft/grad_norm": float(scalars["grad_norm"]),
        "sft/learning_rate": job.learner.learning_rate,
        "sft/packing_fraction": packed.fill_rate,
    }
    if timed:
        values["sft/tokens_per_second"] = sum(len(e.tokens) for e in batch) / seconds
    return state, values


def _validation(job: Job, model: assemble.Model, state: LearnerState, examples: list[Trajectory]) -> dict[str, float]:
    """Mean over all response tokens of the validation examples, in the shapes of training."""
    total = count = 0.0
    for batch in full_batches(examples, job.packing):
        packed = pack(batch, job.packing)
        targets = int(packed.mask.sum())
        mean = mean_loss(job.step, state.trainable, model.params, assemble.device_batch(packed, job.step.placement))
        total, count = total + float(mean) * targets, count + targets
    loss = total / count
    return {"sft/validation_loss": loss, "sft/validation_perplexity": float(np.exp(min(loss, 700.0)))}


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
