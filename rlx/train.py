"""The training loop, from a configuration to a better model. Read `train` from top to bottom.

    rlx train --config=configs/quickstart.py --config.learner.learning_rate=1e-4

With producer.max_policy_lag = 0 every update trains on samples of the version before it, and everything drawn is a
function of the seed, so a run that was killed and resumed ends in the same bits as one that was not. With more,
generation goes on while the trainer trains (`rlx.feed`). The loop owns every effect; what it calls is pure
(`rlx.learner.step`) or writes one thing (`rlx.recorder`, `rlx.checkpoint`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

from rlx import assemble, cli, collapse
from rlx.algos.advantages import advantages
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.data.packing import PackedBatch, pack
from rlx.data.trajectories import advantage_inputs, by_sample, trajectories
from rlx.evaluation import evaluate
from rlx.export import write_policy
from rlx.feed import Feed, Overlapped
from rlx.follow import follow
from rlx.interrupt import EXIT_PREEMPTED, Preempted
from rlx.learner.routing import load_values
from rlx.learner.state import learning_rate
from rlx.learner.step import update
from rlx.metrics.ledger import failed
from rlx.metrics.rollout import grading_outcomes, grading_scalars, rollout_scalars
from rlx.metrics.sample_page import write_page
from rlx.models.placed import bubble
from rlx.parallel import runtime
from rlx.processes import ALONE, Follower, Peers, joined
from rlx.recorder import Scores
from rlx.rollout.buffer import Batch
from rlx.rollout.fates import graded
from rlx.run import Moment, Run, finished, open_training
from rlx.scoring import score_shown
from rlx.sft import cold_start, sft_examples
from rlx.summary import describe, summarise
from rlx.types import Group, Sample


class TrainingStopped(RuntimeError):
    """The run cannot usefully go on: no signal or no finite update for too long, or a policy that has collapsed."""


def train(config: Config, peers: Peers = ALONE) -> dict[str, Any]:
    """Run `config` to its end and return its summary. peers: the trainer's other processes.

    Raises:
      ConfigError: the configuration asks for what this program does not do. TrainingStopped: see there.
      Preempted: SIGTERM or Ctrl-C; a checkpoint of the last whole update is saved. What `open_training` raises.
    """
    updates = config.learner.updates
    refuse_unsupported(config)
    if (done := finished(config)) is not None:
        return done
    with open_training(config, peers) as run:
        # Gives the last moment that a resumed run may continue from; until the first update it starts anew.
        whole = whole_moment(run) if run.resumed else None
        stop_where_collapsed(run)  # one that had is not trained further because it is started again
        try:
            # ------------------------------------------------ before: the base model, a cold start
            if whole is None:
                examples = sft_examples(config, run.model, run.held_out)  # a wrong file must not cost an evaluation
                run.recorder.progress.message(f"{run.directory}: {updates} updates; the first ones compile")
                measure(run, "base")
                if examples:
                    cold_start(run, examples)
                    whole = whole_moment(run)  # not lost where it cannot be published
                    serve_cold_start(run)
            if "before" not in run.progress.evals:
                measure(run, "before")
                whole = whole_moment(run)
                run.save(whole())

            # ------------------------------------------------ the loop
            with run.open_feed() as feed:
                whole = whole_moment(run, feed)
                while run.progress.update < updates:
                    run.preemption.check()
                    if evaluation_is_due(run):
                        measure(run, f"update {run.progress.update}")
                        whole = whole_moment(run, feed)
                        stop_where_collapsed(run)
                    compiled = run.compilations.count
                    batch = rollout(run, feed)
                    # Nothing interrupts from here to the next whole moment: the state is the next update's already.
                    whole, version = None, run.version
                    packed = select(run, batch)
                    scores = score_shown(run, batch.groups)
                    learned = learn(run, feed, batch, packed)
                    run.progress.update += 1
                    try:
                        run.publish(feed, version)
                    finally:  # what was learned is recorded and saved, whether it could be published or not
                        report(run, feed, batch, packed, learned, scores, compiled=run.compilations.count > compiled)
                        whole = whole_moment(run, feed)
                    run.audit(version)
                    stop_where_hopeless(run, batch.groups)
                    stop_where_collapsed(run)
                    save_where_due(run, feed, whole)

            # ------------------------------------------------ after
            measure(run, "after")
            run.save(run.moment(feed), feed)
            stop_where_collapsed(run)
            return finish(run)
        except BaseException:
            # Whatever ended the run, what was learned up to the last whole moment is not lost with it.
            if whole is not None:
                run.save(whole())
            raise


# -------------------------------------------------------------------------------------------------------------- phases


def whole_moment(run: Run, feed: Feed | None = None) -> Callable[[], Moment]:
    """Gives the state after this update when it is asked for, at any time before the next one begins.

    What a synchronous feed generates meanwhile is generated again by a resumed run, in the same bits. An overlapped one
    still holds it, so there the newest state is the right one.
    """
    if isinstance(feed, Overlapped):
        return lambda: run.moment(feed)
    moment = run.moment(feed)
    return lambda: moment


def rollout(run: Run, feed: Feed) -> Batch:
    """The samples of this update, attempted and graded."""
    with run.timers("rollout"):
        return feed.take(run.version)


def select(run: Run, batch: Batch) -> PackedBatch:
    """What is trained on, packed with its advantages, which are relative to all graded samples of a group."""
    inputs = advantage_inputs(batch.groups, run.step.num_sequences)
    if run.frozen is not None and run.config.objective.penalises_rewards:
        with run.timers("score"):
            inputs["rewards"] = run.frozen.penalised(batch.groups, inputs["rewards"], run.state.trainable, run.step)
    with run.timers("pack"):
        credit = by_sample(batch.groups, np.asarray(_advantages(run.config.objective, **inputs)))
        with_head = assemble.head_size(run.config) > 0
        chosen = trajectories(batch.samples, credit, run.version, with_head=with_head)
    if run.frozen is not None:
        with run.timers("score"):
            chosen = run.frozen.scored(chosen)
    with run.timers("pack"):
        return pack(chosen, run.packing)


def learn(run: Run, feed: Feed, batch: Batch, packed: PackedBatch) -> dict[str, float]:
    """One optimizer update. Weights of one that was not finite never existed."""
    if not batch.samples:
        feed.done(batch, applied=False)
        return {}
    rate = float(learning_rate(run.config.learner)(run.version))
    with run.timers("update"):
        run.compiled.result()
        run.peers.tell_each("update", partial(rows_of_process, run, packed))
        run.state, scalars, sums = update(
            run.step,
            run.optimizer,
            run.state,
            run.model.params,
            assemble.device_batch(packed, run.step.placement),
        )
        scalars, sums = jax.device_get((scalars, sums))
    feed.done(batch, bool(scalars["finite"]))
    limit = run.config.learner.max_grad_norm or np.inf
    return (
        sums.values()
        | load_values(run.model.arch, sums.counts)
        | {
            "policy/loss": float(scalars["loss"]),
            "optimizer/grad_norm": float(scalars["grad_norm"]),
            "optimizer/grad_norm_clipped": float(min(scalars["grad_norm"], limit)),
            "optimizer/update_norm": float(scalars["update_norm"]),
            "optimizer/learning_rate": rate,
        }
    )


def rows_of_process(run: Run, packed: PackedBatch, process: int) -> assemble.BatchRows:
    """Those that its devices hold."""
    assert run.step.placement is not None
    return assemble.batch_rows(packed, *run.step.placement.rows_of(process, packed.tokens.shape[1]))


def save_where_due(run: Run, feed: Feed, whole: Callable[[], Moment]) -> None:
    """The last update is saved with the evaluation that follows it."""
    update, config = run.progress.update, run.config
    if update % config.checkpoint.every == 0 and update < config.learner.updates:
        with run.timers("save"):
            run.save(whole(), feed)


def serve_cold_start(run: Run) -> None:
    """The engine serves what the cold start has made of version 0."""
    with run.timers("publish"):
        run.preemption.finish(run.serving.replace(run.policy()))


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
        run.preemption.finish(run.serving.publisher.settled())
        job = evaluate(
            run.serving.engine,
            run.environments,
            run.held_out,
            run.config.eval,
            assemble.eval_sampling(run.config),
        )
        result, groups = run.preemption.run(job)
    attempts = [s for g in groups for s in g.samples]
    run.preemption.call(lambda: run.ledger.generated(tokens_of(attempts), len(attempts), len(groups), into="evaluated"))
    run.recorder.evaluation(label, run.progress.update, result.scalars(), groups)
    run.recorder.progress.message(f"{label}: {result}")
    run.progress.evals[label] = {**result.to_dict(), "version": run.version}


def report(
    run: Run,
    feed: Feed,
    batch: Batch,
    packed: PackedBatch,
    learned: dict[str, float],
    scores: Scores,
    *,
    compiled: bool,
) -> None:
    """Every metric of this update, its samples and the ledger, to where people look."""
    groups, samples = batch.groups, batch.samples
    with run.timers("log"):
        collected = [s for g in groups for s in g.samples]
        signal = any(graded(g).has_signal for g in groups)
        run.progress.no_signal_streak = 0 if signal else run.progress.no_signal_streak + 1
        scalars = rollout_scalars(groups) | grading_scalars(groups) | learned
        scalars |= batch_scalars(run, samples, packed)
        scalars |= {} if run.frozen is None else run.frozen.scalars(packed.num_targets)
        collapse.observe(run.config.collapse, run.progress.guard, scalars)
        scalars["optimizer/skipped_updates"] = float(run.state.skipped)
        scalars["reward/no_signal_streak"] = float(run.progress.no_signal_streak)
        scalars["grader/timeouts"] = float(run.ledger[failed("grader_timeout")].samples)
        scalars["grader/failures"] = float(run.ledger[failed("grader_error")].samples)
        scalars |= feed.scalars()
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
        run.recorder.update(run.progress.update, scalars, groups, arrays, scores)
        run.recorder.ledger(run.preemption.call(run.ledger.get_state))


def stop_where_hopeless(run: Run, groups: Sequence[Group]) -> None:
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


def stop_where_collapsed(run: Run) -> None:
    """Raise TrainingStopped where a bound of config.collapse is broken."""
    why = collapse.reason(run.config.collapse, run.progress.guard, run.progress.evals)
    if why is not None:
        raise TrainingStopped(why)


def finish(run: Run) -> dict[str, Any]:
    """The trained policy as files, and the summary."""
    run.peers.tell("policy")
    written = write_policy(run.config, run.model, run.state, run.directory)
    run.timers.end_update({})
    summary = summarise(run) | {"policy": str(written)}
    run.recorder.summary(summary)
    write_page(run.directory, run.model.tokenizer, run.directory / "samples.html")
    run.recorder.progress.message(run.ledger.table())
    return summary


# -------------------------------------------------------------------------------------------------------------- pieces

_advantages = jax.jit(advantages, static_argnums=0)


def tokens_of(samples: Sequence[Sample]) -> int:
    return sum(s.num_written for s in samples)


def pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    scalars = rollout_scalars(groups)
    return {name.removeprefix("reward/pass_rate_"): v for name, v in scalars.items() if "pass_rate_" in name}


def throughput(rates: dict[str, float]) -> dict[str, float]:
    named = {f"throughput/{name}_per_second": rate for name, rate in rates.items() if name != "updates"}
    return named | ({"throughput/updates_per_hour": rates["updates"] * 3600} if "updates" in rates else {})


def batch_scalars(run: Run, samples: Sequence[Sample], packed: PackedBatch) -> dict[str, float]:
    used, placement = packed.num_micro_batches, run.step.placement
    scalars = {
        "batch/tokens": float(tokens_of(samples)),
        "batch/samples": float(len(samples)),
        "batch/groups": float(len({s.group for s in samples})),
        "batch/rows": float(used * run.packing.rows),
        "batch/micro_batches": float(used),
        "batch/packing_fraction": packed.fill_rate,
        "batch/shared_fraction": packed.shared_fraction,
    }
    if placement is not None and placement.layout.pp > 1:
        scalars["batch/bubble"] = bubble(run.step.arch, placement.layout, placement.micro_batches, placement.rounds)
    return scalars


def refuse_unsupported(config: Config) -> None:
    """Raise ConfigError for objectives that need what this loop does not run."""
    problems = []
    if not config.tasks.held_out:
        problems.append("config.tasks.held_out = 0: rlx train measures before and after on these; set at least 1")
    if config.objective.advantage == "gae":
        problems.append("config.objective.advantage = 'gae': rlx train gives one advantage a sample; use 'group_mean'")
    if problems:
        raise ConfigError(*problems)


def main(argv: list[str] | None = None) -> int:
    """`rlx train`: 0 when the run is complete, 75 after SIGTERM or Ctrl-C (run it again to continue), 1 on an error.

    Of a trainer of several processes each is started so, with the same words.
    """
    argv = sys.argv if argv is None else argv
    config = config_or_exit(argv, flags.FlagValues(), __doc__ or "")
    try:
        with joined(config) as peers:
            if isinstance(peers, Follower):
                return follow(config, peers)
            summary = train(config, peers)
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
