"""A training run in memory: its parts, its state, and how both are opened, saved and restored."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import optax

from rlx import assemble, bridges
from rlx.checkpoint import Checkpoints, Restored
from rlx.compiling import Compiler
from rlx.config.identity import RUN, check_same
from rlx.config.schema import Config
from rlx.data.packing import PackingConfig
from rlx.data.pipeline import TaskStream, digest
from rlx.distillation.frozen import Frozen, open_frozen
from rlx.envs.graders import GraderPool, check_gold_answers
from rlx.envs.tasks import build_tasks
from rlx.feed import Feed, Overlapped, Parts, Synchronous
from rlx.interrupt import Preemption
from rlx.learner.state import LearnerState, make_optimizer
from rlx.learner.step import StepConfig
from rlx.metrics.jsonl import read_json, read_jsonl, write_bytes
from rlx.metrics.ledger import Ledger
from rlx.metrics.rundir import Records, RunDirectory, RunDirectoryError, open_run
from rlx.metrics.timers import Timers
from rlx.models.hf import read_architecture
from rlx.parallel import runtime
from rlx.processes import Peers
from rlx.prompt_checks import check_prompts
from rlx.recorder import Recorder
from rlx.rollout.records import pack, unpack
from rlx.serving import Place, Serving, open_serving, started_servers
from rlx.sessions.environments import Environments, entered
from rlx.types import Task


@dataclasses.dataclass
class Progress:
    """How far the run is. With the stream's and the ledger's state it is what a checkpoint holds beside the arrays."""

    update: int = 0  # iterations of the loop done
    no_signal_streak: int = 0  # collections in a row without any signal
    evals: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # label -> EvalResult
    seconds: float = 0.0  # wall time of the earlier processes of this run
    guard: dict[str, Any] = dataclasses.field(default_factory=dict)  # what `rlx.collapse` remembers


class Moment(NamedTuple):
    """What a checkpoint holds beside the learner's state."""

    host: dict[str, Any]  # JSON
    flow: dict[str, Any]  # what was under way, with arrays (`rlx.rollout.records`); {} where nothing can be


LATER = "later.record"


def write_later(directory: Path, step: int, moment: Moment) -> None:
    """Beside checkpoint `step`, whose learner's state it shares: what has been generated since."""
    write_bytes(directory / LATER, pack({"step": step, "host": moment.host, "flow": moment.flow}))


def with_later(directory: Path, restored: Restored) -> Moment:
    """The newest moment of a restored checkpoint."""
    path = directory / LATER
    if path.exists():
        later = unpack(path.read_bytes())
        if later["step"] == restored.step:
            return Moment(later["host"], later["flow"])
    return Moment(restored.host, unpack(restored.flow) if restored.flow else {})


@dataclasses.dataclass
class Run:
    """The parts never change; the learner's state, progress and ledger do."""

    config: Config
    directory: Path
    model: assemble.Model
    optimizer: optax.GradientTransformation
    step: StepConfig
    packing: PackingConfig
    frozen: Frozen | None  # policies that score an update's samples
    stream: TaskStream
    held_out: list[Task]
    held_out_digest: str
    serving: Serving
    environments: Environments
    checkpoints: Checkpoints
    recorder: Recorder
    preemption: Preemption
    timers: Timers
    compilations: runtime.CompilationCounter
    state: LearnerState
    progress: Progress
    ledger: Ledger
    compiled: Future[None]  # done when the update is compiled
    flow: dict[str, Any] | None  # what was under way in the checkpoint that was restored; None: the run is fresh
    started: float  # time.monotonic() of this process's start
    peers: Peers  # the trainer's other processes

    @property
    def version(self) -> int:
        return int(self.state.version)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier processes included."""
        return self.progress.seconds + time.monotonic() - self.started

    def policy(self) -> Any:
        """What engines should be given now."""
        self.peers.tell("published")
        return bridges.published(self.config, self.model, self.state.trainable, self.version, self.serving.staging)

    def publish(self, feed: Feed, since: int) -> None:
        """Engines serve what an update made of version `since`: nothing new where it was not finite."""
        if self.version > since:
            with self.timers("publish"):
                feed.publish(self.policy(), self.version)

    def audit(self, since: int) -> None:
        """Where one is due after an update of version `since`.

        Raises AuditFailed where a server in service does not serve the version that was published last.
        """
        every = self.config.audit.every
        if self.version > since and every and self.version % every == 0:
            with self.timers("audit"):
                self.preemption.finish(self._audit())

    async def _audit(self) -> None:
        serving, trainable = self.serving, self.state.trainable
        await serving.publisher.settled()
        await bridges.audit(self.config, self.model, serving.fleet, serving.served(), trainable, self.version)

    @property
    def resumed(self) -> bool:
        return self.flow is not None

    def open_feed(self) -> Feed:
        """Where batches come from. What engines serve and the ledger holds must be the run's current state.

        Raises what the update could not be compiled for, where that is known by now: before anything is generated.
        """
        if self.compiled.done():
            self.compiled.result()
        parts = Parts(
            self.config,
            self.environments,
            self.serving,
            self.stream,
            self.ledger,
            self.preemption,
        )
        if not self.config.producer.max_policy_lag:
            return Synchronous(parts)
        return Overlapped(parts, self.directory, self.flow)

    def moment(self, feed: Feed | None = None) -> Moment:
        """The state of now, which is that after update `progress.update`."""

        def take() -> Moment:
            return Moment(self.host_state(), {} if feed is None else feed.get_state(self.progress.update))

        return self.preemption.call(take)

    def host_state(self) -> dict[str, Any]:
        """JSON: everything a resumed run continues from, beside the learner's arrays."""
        return {
            "progress": {**dataclasses.asdict(self.progress), "seconds": self.seconds},
            "stream": self.stream.get_state(),
            "ledger": self.ledger.get_state(),
            "records": self.recorder.records,
            "model": self.model.fingerprint,
            "held_out": self.held_out_digest,
        }

    def save(self, moment: Moment, feed: Feed | None = None) -> None:
        """Start a checkpoint of the learner's state with `moment`, which must belong to it."""
        self.recorder.ledger(moment.host["ledger"])
        self.recorder.sync()
        step = moment.host["progress"]["update"]
        if moment.flow and step == self.checkpoints.latest_step:
            write_later(self.directory, step, moment)
        else:
            flow = pack(moment.flow) if moment.flow else b""
            self.peers.tell("save", step, moment.host, flow)
            self.checkpoints.save(step, self.state, moment.host, flow)
        if feed is not None:
            feed.kept(sorted({*self.checkpoints.steps, step}))


def finished(config: Config) -> dict[str, Any] | None:
    """The summary of the run that `config` names, where it has come to its end; nothing is left to do or to change.

    Raises ConfigError where it was another run's end.
    """
    path = config.run.path
    if config.run.resume == "never" or not (path / "summary.json").is_file():
        return None
    summary = read_json(path / "summary.json")
    if summary["updates"] < config.learner.updates:
        return None
    check_same(read_json(path / "config.json"), config, RUN, str(path))
    print(
        f"{path} is complete: {summary['updates']} updates. Raise learner.updates to go on, or name another run.name."
    )
    return summary


def refuse_to_overwrite(directory: RunDirectory) -> None:
    """Raise RunDirectoryError where a run's checkpoints are gone: starting anew would erase its records.

    The first checkpoint is written while update 1 is made; with a record of update 2 it was there.
    """
    records, _ = read_jsonl(directory.path / "metrics.jsonl")
    if directory.summary.exists() or any(record["update"] >= 2 for record in records):
        raise RunDirectoryError(
            f"{directory.path} holds the records of a run without its checkpoints: choose another run.name, or "
            "remove it"
        )


class LearnerParts(NamedTuple):
    """What each process of a trainer has of the learner."""

    model: assemble.Model
    optimizer: optax.GradientTransformation
    state: LearnerState
    checkpoints: Checkpoints


def learner_parts(config: Config) -> LearnerParts:
    """As they are before the first update. All processes do the same here: they wait for each other.

    Raises what `rlx.assemble.load_model` does, CheckpointError for a directory that cannot be used.
    """
    model = assemble.load_model(config, on_mesh=True)
    state = assemble.fresh_state(config, model)
    checkpoints = Checkpoints(config.run.path / "checkpoints", config.checkpoint.keep)
    return LearnerParts(model, make_optimizer(config.learner), state, checkpoints)


class Beginning(NamedTuple):
    """Where a run goes on from."""

    state: LearnerState
    progress: Progress
    ledger: Ledger
    flow: dict[str, Any] | None  # see Run
    step: int  # of the checkpoint, -1 = none
    records: Records


def beginning(
    config: Config,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    state: LearnerState,
    model: assemble.Model,
    held_out: list[Task],
    stream: TaskStream,
) -> Beginning:
    """From the newest checkpoint, or from a fresh `state`."""
    if checkpoints.latest_step is None:
        refuse_to_overwrite(directory)
        return Beginning(state, Progress(), Ledger(), None, -1, Records(0, 0))
    check_same(read_json(directory.config), config, RUN, str(directory.path))
    return continued(config, directory.path, checkpoints.restore(state), model, held_out, stream)


def scored_shapes(
    config: Config, model: assemble.Model, stack: contextlib.ExitStack
) -> tuple[StepConfig, PackingConfig, Frozen | None]:
    """What an update is compiled for, and the frozen policies that score its samples."""
    step, packing = assemble.shapes(config, model.arch, model.placement)
    frozen = open_frozen(config, model, step, packing)
    if frozen is None:
        return step, packing, None
    stack.callback(frozen.close)
    return step, dataclasses.replace(packing, frozen=frozen.arrays()), frozen


def continued(
    config: Config, path: Path, restored: Restored, model: assemble.Model, held_out: list[Task], stream: TaskStream
) -> Beginning:
    """What a restored checkpoint says; `stream` is set to it. Raises ConfigError where it is of another run."""
    host, flow = with_later(path, restored)
    assemble.check_belongs(config, model, held_out, host, str(path))
    stream.set_state(host["stream"])
    ledger = Ledger()
    ledger.set_state(host["ledger"])
    return Beginning(
        restored.state, Progress(**host["progress"]), ledger, flow, restored.step, Records(*host["records"])
    )


@contextlib.contextmanager
def open_training(config: Config, peers: Peers) -> Iterator[Run]:
    """Build the parts in the order in which they can fail cheaply, and restore the newest checkpoint.

    peers: the trainer's other processes, which begin here.

    Raises:
      ValueError, OSError: tasks, model or tokenizer that cannot be used; says what to do.
      SignalError, VocabularyError: a signal that is damaged, or of a model with other tokens.
      RunDirectoryError, CheckpointError: a run directory that cannot be used as asked. And what `open_serving` raises.
    """
    started = time.monotonic()
    runtime.use_compilation_cache(config.run.compilation_cache)
    train_tasks, held_out = build_tasks(config.tasks)
    arch = read_architecture(config.model.path)
    placement = assemble.trainer_placement(config, arch)  # refused before there is a directory
    with contextlib.ExitStack() as stack:
        stream = assemble.task_stream(config, train_tasks)
        directory = stack.enter_context(open_run(config.run.path, config.run.resume))
        compiler = stack.enter_context(Compiler(config, arch, placement))
        preemption = stack.enter_context(Preemption())
        tasks = [*train_tasks, *held_out]
        graders = stack.enter_context(GraderPool(config.grader, sorted({t.grader for t in tasks})))
        check_gold_answers(graders, tasks)
        group = stack.enter_context(started_servers(config, directory.path))  # they start while the model is read
        peers.watch(preemption.request)
        peers.tell("begin")
        model, optimizer, state, checkpoints = learner_parts(config)
        stack.callback(checkpoints.close)
        stack.callback(peers.tell, "close")  # before
        lengths = check_prompts(config, model.tokenizer, tasks)
        compiler.begin_engine(lengths.values())
        environments = stack.enter_context(entered(Environments(config, model.tokenizer, graders), preemption))
        peers.tell("restore", checkpoints.latest_step)
        begin = beginning(config, directory, checkpoints, state, model, held_out, stream)
        state = begin.state  # this frame lives as long as the run: the fresh one does not beside a restored one
        step, packing, frozen = scored_shapes(config, model, stack)
        model = model if config.lora.rank else dataclasses.replace(model, params={})  # the state has all of them
        compiled = compiler.update(step, optimizer, state, model.params, packing)
        place = Place(directory.path, group, preemption)
        peers.meet()
        peers.tell("published")
        serving = open_serving(config, model, state.trainable, int(state.version), begin.ledger, place)
        run = Run(
            config=config,
            directory=directory.path,
            model=model,
            optimizer=optimizer,
            step=step,
            packing=packing,
            frozen=frozen,
            stream=stream,
            held_out=held_out,
            held_out_digest=digest(held_out),
            serving=stack.enter_context(serving),
            environments=environments,
            checkpoints=checkpoints,
            recorder=stack.enter_context(Recorder(config, directory, begin.step, begin.records)),
            preemption=preemption,
            timers=Timers(config.metrics.skip_updates),
            compilations=runtime.CompilationCounter(),
            state=state,
            progress=begin.progress,
            ledger=begin.ledger,
            compiled=compiled,
            flow=begin.flow,
            started=started,
            peers=peers,
        )
        compiler.wait_for_engine()
        yield run
