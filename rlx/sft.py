"""Supervised fine-tuning on JSONL of {"question", "response"}: a cold start before RL, or a model of its own.

    rlx sft --config=configs/quickstart.py --config.sft.path=examples.jsonl --config.sft.steps=50
    rlx sft ... --config.sft.validation_fraction=0.1 --config.sft.batch_rows=16

The model goes to RUN/sft, of the step with the lowest validation loss where there is one; metrics, TensorBoard events
and checkpoints to RUN/supervised. Start the same command again to continue; `rlx show RUN/supervised` shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from rlx import assemble, cli
from rlx.checkpoint import Checkpoints
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.identity import check_same
from rlx.config.schema import Config
from rlx.envs.tasks import build_tasks
from rlx.export import write_merged
from rlx.interrupt import EXIT_PREEMPTED, Preempted, Preemption
from rlx.learner.state import LearnerState
from rlx.metrics.jsonl import read_json
from rlx.metrics.rundir import Records, RunDirectory, open_run
from rlx.models.spec import Params
from rlx.parallel import runtime
from rlx.run import Run
from rlx.supervised import Examples, Hooks, Progress, fresh, read, supervise
from rlx.supervised_records import SupervisedRecorder
from rlx.types import Task

# What the steps may not change once they have begun: what they are of, and how the examples are dealt out.
SAME = (
    *("model.dtype", "lora", "run.seed", "tasks.system_prompt", "tasks.suffix"),
    *("learner.row_tokens", "learner.micro_batch_rows", "learner.max_grad_norm", "learner.weight_decay"),
    *(f"sft.{key}" for key in ("learning_rate", "batch_size", "batch_rows", "validation_fraction", "eval_every")),
)


def sft_examples(config: Config, model: assemble.Model, held_out: Iterable[Task] = ()) -> Examples | None:
    """The examples of `config.sft`; None where it has no steps. Raises what `read` does."""
    return read(config, model, held_out) if config.sft.steps else None


def cold_start(run: Run, examples: Examples) -> None:
    """Move the run's policy by supervised steps before its first update; it is version 0 still.

    With validation examples it is the policy of their lowest loss.
    """
    kept: list[Params] = []

    def keep(step: int, state: LearnerState) -> None:
        kept[:] = [jax.tree.map(jnp.copy, state.trainable)]

    hooks = Hooks(run.recorder.sft, keep, lambda state, progress: run.preemption.check())
    with run.timers("sft"):
        start = fresh(run.config, run.model, examples, run.state)
        state = supervise(run.config, run.model, examples, start, Progress(), hooks)
    trainable = kept[0] if kept else state.trainable
    zero = jnp.zeros_like(state.version)
    optimizer = assemble.fresh_optimizer(run.config, run.model, run.optimizer, trainable)
    run.state = dataclasses.replace(state, version=zero, trainable=trainable, optimizer=optimizer)


def tune(config: Config) -> dict[str, Any]:
    """`config.sft`'s steps as a run of their own, begun or continued; returns its summary.

    Raises:
      ConfigError: a checkpoint of other settings, another model or other examples.
      Preempted: SIGTERM or Ctrl-C; the last step is saved.
      ValueError, OSError: examples or a model that cannot be used.
    """
    runtime.use_compilation_cache(config.run.compilation_cache)
    _, held_out = build_tasks(config.tasks)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(open_run(config.run.path / "supervised", config.run.resume))
        preemption = stack.enter_context(Preemption())
        model = assemble.load_model(config, on_mesh=True)
        examples = read(config, model, held_out)
        newest = stack.enter_context(_checkpoints(directory.checkpoints))
        best = stack.enter_context(_checkpoints(directory.path / "best"))
        identity = {"model": model.fingerprint, "examples": examples.digest}
        start = fresh(config, model, examples, assemble.fresh_state(config, model))
        state, progress, records = _restore(config, directory, newest, start, identity)
        recorder = stack.enter_context(SupervisedRecorder(config, directory, progress.step, records))
        recorder.message(_plan(config, examples, progress))

        def save(state: LearnerState, progress: Progress) -> None:
            recorder.sync()
            at = {"progress": dataclasses.asdict(progress), "records": recorder.records, "identity": identity}
            newest.save(progress.step, state, at)

        def between(state: LearnerState, progress: Progress) -> None:
            if preemption.requested or (progress.step and progress.step % config.sft.save_every == 0):
                save(state, progress)
            preemption.check()

        hooks = Hooks(recorder.report, lambda step, state: best.save(step, state, {}), between)
        state = supervise(config, model, examples, state, progress, hooks)
        save(state, progress)
        if progress.best_step:
            state = best.restore(state, progress.best_step).state
        summary = _export(config, model, state, progress)
        recorder.summary(summary)
        return summary


@contextlib.contextmanager
def _checkpoints(directory: Path) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(directory, keep=1)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def _restore(
    config: Config, directory: RunDirectory, newest: Checkpoints, start: LearnerState, identity: dict[str, str]
) -> tuple[LearnerState, Progress, Records]:
    """The newest checkpoint's state, or `start` where there is none."""
    if newest.latest_step is None:
        return start, Progress(), Records(0, 0)
    check_same(read_json(directory.config), config, SAME, str(directory.path))
    restored = newest.restore(start)
    for what, now in identity.items():
        if restored.host["identity"][what] != now:
            key = {"model": "model.path", "examples": "sft.path"}[what]
            raise ConfigError(
                f"config.{key}: {directory.path} was begun with other files; give those, or another config.run.name"
            )
    progress = Progress(**restored.host["progress"])
    if progress.step > config.sft.steps:
        raise ConfigError(f"config.sft.steps = {config.sft.steps}: {directory.path} is at step {progress.step} already")
    return restored.state, progress, Records(*restored.host["records"])


def _plan(config: Config, examples: Examples, progress: Progress) -> str:
    apart = f", {len(examples.validation)} for validation" if examples.validation else ", no validation"
    resumed = f"; continues after step {progress.step}" if progress.step else "; the first step compiles"
    return f"{config.sft.steps} steps on {len(examples.training)} examples{apart}{resumed}"


def _export(config: Config, model: assemble.Model, state: LearnerState, progress: Progress) -> dict[str, Any]:
    """Writes the model, whole or not at all, and returns the summary."""
    to, beside = config.run.path / "sft", config.run.path / ".sft.new"
    if beside.exists():
        shutil.rmtree(beside)
    write_merged(config, model, state, beside)
    os.replace(beside, to)
    return {
        "steps": progress.step,
        "examples": progress.examples,
        "exported_step": progress.best_step or progress.step,
        "validation_loss": progress.best_loss if progress.best_step else None,
        "validation_loss_before": progress.base_loss if progress.best_step else None,
        "policy": str(to),
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    loss, before, to = summary["validation_loss"], summary["validation_loss_before"], summary["policy"]
    which = ""
    if loss is not None:
        which = (
            f", of step {summary['exported_step']}: its validation loss is the lowest, {loss:.4f}, before {before:.4f}"
        )
    if loss is not None and loss >= before:
        which += "; the examples have not made it better"
    return f"the tuned model is in {to}{which}\ntrain it with --config.model.path={to}, talk to it: rlx chat {to}"


def main(argv: list[str] | None = None) -> int:
    """`rlx sft`: 0 when the model is written, 75 after SIGTERM or Ctrl-C (run it again to continue), 2 where there is
    nothing to do or the model exists."""
    argv = sys.argv if argv is None else argv
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    directory = config.run.path / "sft"
    if not config.sft.steps:
        print("rlx sft: config.sft.steps = 0: nothing to do; give --config.sft.steps=50", file=sys.stderr)
        return 2
    if directory.exists():
        print(f"rlx sft: {directory} exists; choose another --config.run.name or remove it", file=sys.stderr)
        return 2
    try:
        print(describe(tune(config)))
    except Preempted:
        print("rlx sft: stopped by a signal. Run the same command again to continue.", file=sys.stderr)
        return EXIT_PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("sft", sys.argv[1:]))
