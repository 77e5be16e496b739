"""The training loop, from a configuration to a better model. Read `train` from top to bottom.

    rlx train --config=configs/quickstart.py --config.learner.learning_rate=1e-4

Synchronous: every update trains on samples of the version before it (lag 0), and everything drawn is a function of the
seed, so a run that was killed and resumed ends in the same bits as one that was not. The loop owns every effect; what
it calls is pure (`rlx.learner.step`) or writes one thing (`rlx.recorder`, `rlx.checkpoint`).
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from absl import flags

from rlx import assemble, cli
from rlx.algos.advantages import advantages
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.data.packing import PackedBatch, pack
from rlx.data.trajectories import advantage_inputs, by_sample, fates, graded, trajectories
from rlx.evaluate import evaluate
from rlx.export import write_policy
from rlx.interrupt import EXIT_PREEMPTED, Preempted
from rlx.learner.state import learning_rate
from rlx.learner.step import update
from rlx.metrics.ledger import failed
from rlx.metrics.rollout import grading_outcomes, grading_scalars, rollout_scalars
from rlx.parallel import runtime
from rlx.rollout.collect import collect
from rlx.run import Run, finished, open_training
from rlx.sft import cold_start, sft_examples
from rlx.types import Group, Sample


class TrainingStopped(RuntimeError):
    """The run cannot usefully go on: no signal, or no finite update, for too long."""


def train(config: Config) -> dict[str, Any]:
    """Run `config` to its end and return its summary.

    Raises:
      ConfigError: the configuration asks for what this program does not do.
      Preempted: SIGTERM or Ctrl-C; a checkpoint of the last whole update is saved.
      TrainingStopped: see there. Further errors: `rlx.run.open_training`.
    """
    refuse_unsupported(config)
    done = finished(config)
    if done is not None:
        return done
    with open_training(config) as run:
        # Of the last moment that a resumed run may continue from; until the first update it starts anew.
        whole = run.host_state() if run.resumed else None
        try:
            # ------------------------------------------------ before: the base model, a cold start
            if whole is None:
                examples = sft_examples(config, run.model, run.held_out)  # a wrong file must not cost an evaluation
                run.recorder.progress.message(
                    f"{run.directory}: {config.learner.updates} updates; the first ones compile"
                )
                measure(run, "base")
                if examples:
                    cold_start(run, examples)
                    publish(run)
                measure(run, "before")
                whole = run.host_state()
                run.save(whole)

            # ------------------------------------------------ the loop
            while run.progress.update < config.learner.updates:
                run.preemption.check()
                if evaluation_is_due(run):
                    measure(run, f"update {run.progress.update}")
                    whole = run.host_state()
                compiled = run.compilations.count
                groups = rollout(run)
                # Nothing interrupts from here to the next whole moment: the state is that of the next update already.
                whole = None
                samples, packed = select(run, groups)
                learned = learn(run, samples, packed) if samples else {}
                run.progress.update += 1
                report(run, groups, samples, packed, learned, compiled=run.compilations.count > compiled)
                whole = run.host_state()
                stop_where_hopeless(run, groups)
                # The last one is saved with the evaluation that follows it.
                if run.progress.update % config.checkpoint.every == 0 and run.progress.update < config.learner.updates:
                    with run.timers("save"):
                        run.save(whole)

            # ------------------------------------------------ after
            measure(run, "after")
            run.save(run.host_state())
            return finish(run)
        except BaseException:
            # Whatever ended the run, what was learned up to the last whole moment is not lost with it.
            if whole is not None:
                run.save(whole)
            raise


# -------------------------------------------------------------------------------------------------------------- phases


def rollout(run: Run) -> list[Group]:
    """The next tasks, attempted and graded; booked in the ledger as in flight."""
    with run.timers("rollout"):
        instances = run.stream.next_tasks(run.config.rollout.tasks_per_update)
        asked = [(instance.group, instance.task) for instance in instances]
        job = collect(run.engine, run.graders, run.model.tokenizer, asked, assemble.sampling(run.config))
        groups = run.preemption.run(job)
    samples = [s for g in groups for s in g.samples]
    run.ledger.generated(sum(s.num_written for s in samples), len(samples), len(groups))
    return groups


def select(run: Run, groups: list[Group]) -> tuple[list[Sample], PackedBatch]:
    """What is trained on, packed with its advantages; everything else goes to its bin of the ledger."""
    config = run.config
    with run.timers("pack"):
        chosen: list[Sample] = []
        for group in groups:
            bins = fates(
                group,
                filter_no_signal=config.rollout.filter_no_signal,
                mask_truncated=config.rollout.truncated == "mask",
            )
            for i, (name, samples) in enumerate(bins.items()):
                run.ledger.move("in_flight", name, tokens_of(samples), len(samples), groups=int(i == 0))
            chosen += bins.get("buffered", [])
        inputs = advantage_inputs(groups, run.step.num_sequences)
        credit = by_sample(groups, np.asarray(_advantages(config.objective, **inputs)))
        with_head = run.packing.head_size > 0
        return chosen, pack(trajectories(chosen, credit, run.version, with_head=with_head), run.packing)


def learn(run: Run, samples: list[Sample], packed: PackedBatch) -> dict[str, float]:
    """One optimizer update, published to the engine. Weights of an update that was not finite never existed."""
    rate = float(learning_rate(run.config.learner)(run.version))
    with run.timers("update"):
        batch = assemble.device_batch(packed)
        run.state, scalars, sums = update(run.step, run.optimizer, run.state, run.model.params, batch)
        scalars, sums = jax.device_get((scalars, sums))
    groups = run.ledger["buffered"].groups
    applied = bool(scalars["finite"])
    run.ledger.move(
        "buffered", "trained" if applied else failed("nonfinite_update"), tokens_of(samples), len(samples), groups
    )
    if applied:
        publish(run)
    limit = run.config.learner.max_grad_norm or np.inf
    return sums.values() | {
        "policy/loss": float(scalars["loss"]),
        "optimizer/grad_norm": float(scalars["grad_norm"]),
        "optimizer/grad_norm_clipped": float(min(scalars["grad_norm"], limit)),
        "optimizer/update_norm": float(scalars["update_norm"]),
        "optimizer/learning_rate": rate,
    }


def publish(run: Run) -> None:
    """The engine serves the learner's current version from here on."""
    with run.timers("publish"):
        run.preemption.finish(run.engine.load(run.policy(), run.version))


def evaluation_is_due(run: Run) -> bool:
    """A resumed run may stand at an update that was saved before its evaluation, or after."""
    update, every = run.progress.update, run.config.eval.every
    return bool(every and update and update % every == 0) and f"update {update}" not in run.progress.evals


def measure(run: Run, label: str) -> None:
    """Evaluate what the engine serves on the held-out tasks. The same weights are not measured twice."""
    latest = next(reversed(run.progress.evals.values()), None)
    if latest is not None and latest["version"] == run.version and not (label == "before" and run.config.sft.steps):
        run.progress.evals[label] = latest
        return
    with run.timers("eval"):
        job = evaluate(
            run.engine,
            run.graders,
            run.model.tokenizer,
            run.held_out,
            run.config.eval,
            assemble.eval_sampling(run.config),
        )
        result, groups = run.preemption.run(job)
    attempts = [s for g in groups for s in g.samples]
    run.ledger.generated(tokens_of(attempts), len(attempts), len(groups), into="evaluated")
    run.recorder.evaluation(label, run.progress.update, result.scalars(), groups)
    run.recorder.progress.message(f"{label}: {result}")
    run.progress.evals[label] = {**result.to_dict(), "version": run.version}


def report(
    run: Run,
    groups: list[Group],
    samples: list[Sample],
    packed: PackedBatch,
    learned: dict[str, float],
    *,
    compiled: bool,
) -> None:
    """Every metric of this update, its samples and the ledger, to where people look."""
    run.ledger.check()
    with run.timers("log"):
        collected = [s for g in groups for s in g.samples]
        signal = any(graded(g).has_signal for g in groups)
        run.progress.no_signal_streak = 0 if signal else run.progress.no_signal_streak + 1
        scalars = rollout_scalars(groups) | grading_scalars(groups) | learned
        scalars |= batch_scalars(run, samples, packed) | run.ledger.scalars()
        scalars["optimizer/skipped_updates"] = float(run.state.skipped)
        scalars["reward/no_signal_streak"] = float(run.progress.no_signal_streak)
        scalars["grader/timeouts"] = float(run.ledger[failed("grader_timeout")].samples)
        scalars["grader/failures"] = float(run.ledger[failed("grader_error")].samples)
        scalars["engine/occupancy"] = run.engine.stats.occupancy
        scalars["system/compilations"] = float(run.compilations.count)
        scalars["system/host_memory_gib"] = runtime.host_memory_gib()
        scalars |= runtime.device_memory_gib()
    done = {
        "generated_tokens": tokens_of(collected),
        "trained_tokens": tokens_of(samples),
        "samples": len(samples),
        "updates": 1,
    }
    times = run.timers.end_update(done, compiled)
    scalars |= times.scalars() | throughput(times.rates)
    scalars["time/wait_share"] = times.share("rollout")
    arrays: dict[str, list[float]] = {
        "reward/distribution": [s.reward for s in collected],
        "response/length": [s.num_written for s in collected],
        "offpolicy/age": packed.ages[packed.mask].tolist(),
    }
    with run.timers("log"):
        run.recorder.update(run.progress.update, scalars, groups, arrays)
        run.recorder.ledger(run.ledger)


def stop_where_hopeless(run: Run, groups: list[Group]) -> None:
    """Raise TrainingStopped where going on would only cost."""
    config, streak = run.config, run.progress.no_signal_streak
    if config.rollout.filter_no_signal and streak >= config.rollout.no_signal_limit:
        raise TrainingStopped(
            f"{streak} collections in a row (rollout.no_signal_limit) had no group with different rewards; pass rates "
            f"of the last one: {pass_rates(groups)}, grading: {dict(grading_outcomes(groups))}. Choose tasks that the "
            "model solves sometimes, raise rollout.group_size, or look at samples.jsonl."
        )
    skipped = int(run.state.skipped_in_row)
    if skipped >= config.learner.nonfinite_limit:
        raise TrainingStopped(
            f"{skipped} updates in a row (learner.nonfinite_limit) had a loss, gradient or new weights that are not "
            f"finite. The published weights are those of version {run.version}; lower learner.learning_rate or look "
            "for inf in the model's weights."
        )


def finish(run: Run) -> dict[str, Any]:
    """The trained policy as files, and the summary."""
    written = write_policy(run.config, run.model, run.state, run.directory)
    run.timers.end_update({})
    summary = summarise(run) | {"policy": str(written)}
    run.recorder.summary(summary)
    run.recorder.progress.message(run.ledger.table())
    return summary


# -------------------------------------------------------------------------------------------------------------- pieces

_advantages = jax.jit(advantages, static_argnums=0)


def tokens_of(samples: list[Sample]) -> int:
    return sum(s.num_written for s in samples)


def pass_rates(groups: list[Group]) -> dict[str, float]:
    scalars = rollout_scalars(groups)
    return {name.removeprefix("reward/pass_rate_"): v for name, v in scalars.items() if "pass_rate_" in name}


def throughput(rates: dict[str, float]) -> dict[str, float]:
    named = {f"throughput/{name}_per_second": rate for name, rate in rates.items() if name != "updates"}
    return named | ({"throughput/updates_per_hour": rates["updates"] * 3600} if "updates" in rates else {})


def batch_scalars(run: Run, samples: list[Sample], packed: PackedBatch) -> dict[str, float]:
    used = packed.num_micro_batches
    return {
        "batch/tokens": float(tokens_of(samples)),
        "batch/samples": float(len(samples)),
        "batch/groups": float(len({s.group for s in samples})),
        "batch/rows": float(used * run.packing.rows),
        "batch/micro_batches": float(used),
        "batch/packing_fraction": packed.fill_rate,
    }


def summarise(run: Run) -> dict[str, Any]:
    """What `summary.json` says of a run that came to its end."""
    evals = run.progress.evals
    summary: dict[str, Any] = {"updates": run.progress.update, "version": run.version}
    for label in ("base", "before", "after"):
        result = evals[label]
        summary[f"eval/pass_rate_{label}"] = result["pass_rate"]
        summary[f"eval/interval_{label}"] = [result["pass_rate_low"], result["pass_rate_high"]]
        summary[f"eval/by_source_{label}"] = result["by_source"]
    return summary | {
        "eval/attempts": evals["after"]["attempts"],
        "eval/evaluations": evals,
        "ledger": run.ledger.get_state(),
        "skipped_updates": int(run.state.skipped),
        "seconds": run.seconds,
        "seconds_by_phase": run.timers.totals,
        "peak_memory_gib": runtime.peak_host_memory_gib(),
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    lines, evals = [], summary["eval/evaluations"]
    # Without a cold start training begins at the base model: one evaluation, one line.
    for label in ("before", "after") if evals["base"] == evals["before"] else ("base", "before", "after"):
        low, high = summary[f"eval/interval_{label}"]
        lines.append(
            f"held-out pass rate {label:>7}: {summary[f'eval/pass_rate_{label}']:.3f}  [{low:.3f}, {high:.3f}]"
        )
    lines.append(
        f"{summary['eval/attempts']} attempts each; {summary['updates']} updates in {summary['seconds']:.0f} s, "
        f"{summary['peak_memory_gib']:.1f} GiB; trained policy in {summary['policy']}"
    )
    return "\n".join(lines)


def refuse_unsupported(config: Config) -> None:
    """Raise ConfigError for objectives that need what this loop does not run."""
    problems = []
    if not config.tasks.held_out:
        problems.append("config.tasks.held_out = 0: rlx train measures before and after on these; set at least 1")
    if config.objective.advantage == "gae":
        problems.append("config.objective.advantage = 'gae': rlx train gives one advantage a sample; use 'group_mean'")
    if config.objective.kl_coefficient:
        coefficient = config.objective.kl_coefficient
        problems.append(
            f"config.objective.kl_coefficient = {coefficient}: rlx train has no reference model; set it to 0"
        )
    if config.objective.distill.form != "off":
        form = config.objective.distill.form
        problems.append(f"config.objective.distill.form = {form!r}: rlx train has no teacher; set it to 'off'")
    if problems:
        raise ConfigError(*problems)


def main(argv: list[str] | None = None) -> int:
    """`rlx train`: 0 when the run is complete, 75 after SIGTERM or Ctrl-C (run it again to continue), 1 on an error."""
    argv = sys.argv if argv is None else argv
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    try:
        summary = train(config)
    except Preempted:
        print(
            "rlx train: stopped by a signal. Run the same command again to continue from what is saved.",
            file=sys.stderr,
        )
        return EXIT_PREEMPTED
    print(describe(summary))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("train", sys.argv[1:]))
