"""Evaluation beside a run: a process of its own that tests saved versions as they appear, against the base model.

    rlx evaluate --watch=runs/quickstart [--nth=5] [--attempts=8]

It reads the run's checkpoints and writes RUN/watch/ only, so that the trainer neither waits for it nor knows of it; it
may run on another machine that sees the directory. It follows the run through restarts, goes on where it was stopped,
leaves out what the trainer has pruned before it could be read, and ends when the run is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from rlx import assemble
from rlx.checkpoint import CheckpointError, Checkpoints, Restored
from rlx.config.parse import parse_recorded
from rlx.config.schema import Config
from rlx.envs.graders import GraderPool
from rlx.envs.tasks import build_tasks
from rlx.evaluation import EvalResult, evaluate
from rlx.metrics.jsonl import JsonlWriter, read_json, read_jsonl
from rlx.metrics.names import check_names
from rlx.metrics.tensorboard import TensorBoard
from rlx.metrics.view import NotARun
from rlx.parallel import runtime
from rlx.proxy.compare import difference
from rlx.proxy.report import rate
from rlx.proxy.runs import WATCH, Evaluation, Point
from rlx.rollout.engine import Replica
from rlx.sessions.environments import Environments
from rlx.types import Task

BASE = "base"
PRUNED_WITHIN_S = 60.0  # seconds that the removal of a checkpoint may take
HELD = "held"  # the folder of the checkpoint that is being read


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    nth: int = 0  # of the saved versions, the last one always; 0 = eval.watch_nth
    attempts: int = 0  # at each task; 0 = eval.attempts_per_task
    poll_s: float = 5.0  # seconds between two looks
    patience_s: float = 0.0  # seconds without anything new after which it gives up; 0 = never

    def __post_init__(self) -> None:
        if self.nth < 0 or self.attempts < 0 or self.poll_s <= 0 or self.patience_s < 0:
            raise ValueError(f"--nth, --attempts and --patience at least 0, --poll above 0, got {self}")


@dataclasses.dataclass(eq=False)
class Watcher:
    """The model in memory with what was tested so far."""

    run: Path
    config: Config
    options: WatchOptions
    model: assemble.Model
    held_out: list[Task]
    engine: Replica
    environments: Environments
    records: JsonlWriter
    board: TensorBoard
    tested: dict[int, dict[str, Any]]  # version -> its record
    seen: set[int] = dataclasses.field(default_factory=set)  # checkpoints that need no further look

    @property
    def attempts(self) -> int:
        return self.options.attempts or self.config.eval.attempts_per_task

    async def base(self) -> None:
        """The model that the run began with is version 0."""
        state = assemble.fresh_state(self.config, self.model)
        await self.test(BASE, 0, assemble.policy_params(self.config, self.model, state.trainable), version=-1)

    async def test(self, label: str, update: int, policy: Any, version: int) -> None:
        """One evaluation, recorded. `version` -1 stands for the base model."""
        await self.engine.load(policy, max(version, 0))
        sampling = dataclasses.replace(assemble.eval_sampling(self.config), group_size=self.attempts)
        config = dataclasses.replace(self.config.eval, k=tuple(k for k in self.config.eval.k if k <= self.attempts))
        start = time.monotonic()
        result, _ = await evaluate(self.engine, self.environments, self.held_out, config, sampling)
        scalars = result.scalars()
        check_names(scalars)
        record = {"update": update, "version": version, "label": label, "seconds": time.monotonic() - start, **scalars}
        if label != BASE:
            record["less_base"] = list(difference(_as_evaluation(record), _as_evaluation(self.tested[-1])))
        self.records.append(record)
        self.records.sync()
        self.board.scalars(scalars, update)
        self.board.flush()
        self.tested[version] = record
        say(f"{label}: {describe(record, result)}")

    def due(self) -> list[int]:
        """Saved checkpoints that should be tested now, oldest first."""
        every, last = self.config.checkpoint.every, self.config.learner.updates
        nth = self.options.nth or self.config.eval.watch_nth
        return [
            step
            for step in saved_steps(self.run)
            if step and step not in self.seen and (step == last or (step // every) % nth == 0)
        ]

    def load(self, step: int) -> Restored | None:
        """A checkpoint; None where the trainer has pruned it meanwhile."""
        checkpoint, held = self.run / "checkpoints" / str(step), self.run / WATCH / HELD
        try:
            return self._restore(held, step) if hold(checkpoint, held / str(step)) else None
        except CheckpointError:
            # It may have been held when half of it was pruned already; then the rest is about to go.
            if not gone_within(checkpoint, PRUNED_WITHIN_S):
                raise
            return None
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _restore(self, directory: Path, step: int) -> Restored:
        checkpoints = Checkpoints(directory, keep=None)
        try:
            return checkpoints.restore(assemble.fresh_state(self.config, self.model), step)
        finally:
            checkpoints.close()

    async def look(self) -> bool:
        """Tests one checkpoint where one is due; whether there was one."""
        for step in self.due():
            self.seen.add(step)
            if any(record["update"] == step for version, record in self.tested.items() if version >= 0):
                continue
            restored = self.load(step)
            if restored is None:
                say(f"update {step}: pruned before it could be read; raise checkpoint.keep, or --nth")
                continue
            version = int(restored.state.version)
            if version in self.tested:
                say(f"update {step}: version {version} is tested already")
                continue
            assemble.check_belongs(self.config, self.model, self.held_out, restored.host, str(self.run))
            policy = assemble.policy_params(self.config, self.model, restored.state.trainable)
            await self.test(f"update {step}", step, policy, version)
            return True
        return False


async def follow(watcher: Watcher) -> list[dict[str, Any]]:
    """Tests what appears until the run is complete and nothing is due; returns the records.

    Raises:
      TimeoutError: nothing new for `patience_s` seconds.
    """
    if -1 not in watcher.tested:
        await watcher.base()
    since = time.monotonic()
    while True:
        complete = (watcher.run / "summary.json").is_file()  # looked at first: what it was saved with is then there
        if await watcher.look():
            since = time.monotonic()
        elif complete:
            return list(watcher.tested.values())
        elif watcher.options.patience_s and time.monotonic() - since > watcher.options.patience_s:
            raise TimeoutError(f"{watcher.run}: nothing new for {watcher.options.patience_s:g} s (--patience)")
        else:
            await asyncio.sleep(watcher.options.poll_s)


def watch(run: Path, options: WatchOptions) -> list[dict[str, Any]]:
    """Follows the run in `run` to its end; see `follow`. Every version is tested once, also over several calls.

    Raises:
      NotARun: no run appears in `patience_s` seconds, or at once where that is 0.
      RuntimeError: another process watches the run.
    """
    config = read_config(run, options)
    directory = run / WATCH
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("a") as lock:
        _lock(lock, run)
        runtime.use_compilation_cache(config.run.compilation_cache)
        _, held_out = build_tasks(config.tasks)
        model = assemble.load_model(config)
        policy = assemble.policy_params(config, model, assemble.fresh_state(config, model).trainable)
        engine = assemble.make_engine(config, model, policy, 0)
        tested = {record["version"]: record for record in tested_before(directory)}
        records = JsonlWriter(directory / "evaluations.jsonl")
        after = max((record["update"] for record in tested.values()), default=-1)
        with (
            GraderPool(config.grader, sorted({t.grader for t in held_out})) as graders,
            TensorBoard(directory / "events", after, dataclasses.asdict(config)) as board,
        ):
            environments = Environments(config, model.tokenizer, graders)
            watcher = Watcher(run, config, options, model, held_out, engine, environments, records, board, tested)

            async def job() -> list[dict[str, Any]]:
                async with environments:
                    return await follow(watcher)

            return asyncio.run(job())


def read_config(run: Path, options: WatchOptions) -> Config:
    """The configuration of a run that has begun; waits for one that has not."""
    until = time.monotonic() + options.patience_s
    while not (run / "config.json").is_file():
        if time.monotonic() >= until:
            raise NotARun(f"{run}: no run has begun there; start it, or give --patience=SECONDS to wait for it")
        time.sleep(min(options.poll_s, 1.0))
    config = parse_recorded(read_json(run / "config.json"), run / "config.json")
    own = dataclasses.replace(config.run, directory=str(run.parent), name=run.name)
    return dataclasses.replace(config, run=own)


def saved_steps(run: Path) -> list[int]:
    """Complete checkpoints are directories named by their update; one that is being written has a longer name."""
    directory = run / "checkpoints"
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit()) if directory.is_dir() else []


def hold(checkpoint: Path, to: Path) -> bool:
    """Hard links to a checkpoint's files, which the trainer's pruning leaves in place; False where it was too late."""
    shutil.rmtree(to, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, to, copy_function=_link)
    except OSError:  # files that go one after the other under its hands, or a true fault
        if not gone_within(checkpoint, PRUNED_WITHIN_S):
            raise
        return False
    return checkpoint.exists()


def gone_within(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _link(source: str, to: str) -> None:
    """A copy where the file system has no hard links."""
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, to)


def tested_before(directory: Path) -> Iterator[dict[str, Any]]:
    file = directory / "evaluations.jsonl"
    if file.is_file():
        yield from read_jsonl(file)[0]


def describe(record: dict[str, Any], result: EvalResult) -> str:
    if "less_base" not in record:
        return str(result)
    middle, low, high = record["less_base"]
    return f"{result}; less the base {middle:+.3f} [{low:+.3f}, {high:+.3f}]"


def say(text: str) -> None:
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def _as_evaluation(record: dict[str, Any]) -> Evaluation:
    point = Point(record["update"], record["seconds"], 0.0, record["eval/pass_rate"])
    ends = (record["eval/pass_rate_low"], record["eval/pass_rate_high"])
    return Evaluation(point, *ends, record["eval/attempts"], record["eval/tasks"])


def _lock(lock: TextIO, run: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RuntimeError(f"{run} is watched by another process already: it would test every version twice") from error


def main(argv: list[str]) -> int:
    """`rlx evaluate --watch`: prints a line a version; its last line is JSON."""
    parser = argparse.ArgumentParser(
        prog="rlx evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--watch", type=Path, required=True, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--nth", type=int, default=0, help="test every Nth saved version, and the last (eval.watch_nth)"
    )
    parser.add_argument("--attempts", type=int, default=0, help="at each held-out task (eval.attempts_per_task)")
    parser.add_argument("--poll", type=float, default=5.0, metavar="S", help="seconds between two looks (5)")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S", help="give up after so long without news")
    arguments = parser.parse_args(argv)
    options = WatchOptions(arguments.nth, arguments.attempts, arguments.poll, arguments.patience)
    records = watch(arguments.watch, options)
    best = max(records, key=lambda record: record["eval/pass_rate"])
    shown = rate(*(best[f"eval/{name}"] for name in ("pass_rate", "pass_rate_low", "pass_rate_high")))
    say(f"complete: {len(records) - 1} versions tested; the best is {best['label']} with {shown}")
    print(json.dumps(records))
    return 0
