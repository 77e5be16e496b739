"""What generation beside training saves: wall time at lag 1 against lag 0, at the same number of trained groups.

    python -m bench.overlap [--repeats 3] [--seconds 0.4] [--embedded] [--json FILE]

Two parts, real clock, interleaved runs, medians:

    apart      engines that sleep, as if they were another device: a collection takes as long to generate as to train
    embedded   (--embedded) `rlx train` by configs/quickstart.py, engine and trainer on the same cores, a trained token;
               8 x 8 samples an update, all of them trained, so that both sides train as much as they generate

The first shows what the loop can hide; the second what is left where both sides want the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlx.envs.graders import GraderPool
from rlx.envs.grading import Grade, Outcome
from rlx.metrics.ledger import Ledger
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling, collect
from rlx.rollout.engine import Completion, Request
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.rollout.session import TaskEnvironment, questions
from rlx.sync.publisher import Publisher
from rlx.types import StopReason, Task, VersionSpan

GROUPS, GROUP_SIZE, TOKENS, UPDATES = 8, 8, 16, 12
SAMPLING = Sampling(GROUP_SIZE, TOKENS, 1.0, False, 0)
GOAL = 0.65


class SleepingEngine:
    """Takes `seconds` for each collection's worth of requests, whatever the host does meanwhile."""

    name, admission = "sleeping", GROUPS * GROUP_SIZE

    def __init__(self, seconds: float):
        self.seconds, self.version = seconds, 0

    async def generate(self, request: Request) -> list[Completion]:
        began = self.version
        await asyncio.sleep(self.seconds)
        half = TOKENS // 2 if self.version != began else TOKENS
        spans = [VersionSpan(began, 0, half), VersionSpan(self.version, half, TOKENS)]
        written = tuple(s for s in spans if s.end > s.start)
        logprobs = np.full(TOKENS, -1.0, np.float32)
        return [
            Completion(np.full(TOKENS, seed % 100, np.int32), logprobs, None, written, StopReason.LENGTH)
            for seed in request.seeds
        ]

    async def load(self, weights: Any, version: int, /) -> None:
        self.version = version


class ParityGraders:
    def grade(self, task: Task, text: str) -> asyncio.Future[Grade]:
        future: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        future.set_result(Grade(float(int(text) % 2), text, "", 0.0, Outcome.GRADED))
        return future


class Numbers:
    """A tokenizer that knows one prompt, and reads the first token of a response."""

    def encode_prompt(self, question: str) -> np.ndarray:
        return np.arange(4, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return str(int(ids[0]))


def tasks() -> Iterator[tuple[int, Task]]:
    return ((number, Task(f"bench/{number}", "bench", "?", None, "exact")) for number in itertools.count())


async def one_after_the_other(seconds: float) -> float:
    """Wall seconds of UPDATES updates at lag 0."""
    engine, source, graders = SleepingEngine(seconds), tasks(), cast(GraderPool, ParityGraders())
    began = time.perf_counter()
    for version in range(UPDATES):
        asked = list(itertools.islice(source, GROUPS))
        await collect(engine, questions(graders, Numbers()), asked, SAMPLING)
        await asyncio.to_thread(time.sleep, seconds)  # the trainer, on a device of its own
        await engine.load(None, version + 1)
    return time.perf_counter() - began


async def overlapped(seconds: float, lag: int) -> float:
    """Wall seconds of UPDATES updates, the filling of the pipeline included."""
    ledger, engine, source = Ledger(), SleepingEngine(seconds), tasks()
    buffer = Buffer(Rules(GROUPS, lag, False, False, 1 << 30, False, True), ledger)
    fleet = Fleet([engine], FleetOptions(), None, 0, ledger)
    publisher = Publisher(fleet, "refresh")
    options = ProducerOptions(Budgets(GROUPS * GROUP_SIZE, 2 * GROUPS * GROUP_SIZE, GROUPS), gradings=64)
    make = lambda task: TaskEnvironment(task, ParityGraders(), Numbers())  # noqa: E731
    producer = Producer(fleet, make, lambda: next(source), buffer, ledger, SAMPLING, options)
    began = time.perf_counter()
    async with fleet, producer:
        for version in range(UPDATES):
            batch = await buffer.take(version)
            await asyncio.to_thread(time.sleep, seconds)
            buffer.done(batch, applied=True)
            await publisher.publish(None, version + 1)
            ledger.check(producer.holdings() | buffer.holdings())
        return time.perf_counter() - began


def apart(repeats: int, seconds: float) -> dict[str, float]:
    pairs = [(asyncio.run(one_after_the_other(seconds)), asyncio.run(overlapped(seconds, 1))) for _ in range(repeats)]
    first, second = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {"lag_0_seconds": first, "lag_1_seconds": second, "ratio": second / first}


def train(directory: Path, lag: int, updates: int) -> dict[str, float]:
    """One run in a process of its own: seconds and trained tokens of its updates after the first three."""
    run = directory / f"lag{lag}"
    keys = {
        "run.directory": directory,
        "run.name": run.name,
        "learner.updates": updates,
        "rollout.tasks_per_update": GROUPS,
        "rollout.group_size": GROUP_SIZE,
        "rollout.filter_no_signal": False,
        "tasks.held_out": 4,
        "eval.attempts_per_task": 1,
        "eval.k": "(1,)",
        "checkpoint.every": updates,
        "producer.max_policy_lag": lag,
        "metrics.tensorboard": False,
    }
    command = [sys.executable, "-m", "rlx.train", "--config=configs/quickstart.py"]
    command += [f"--config.{key}={value}" for key, value in keys.items()]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["update"] > 3 and "policy/loss" in line]
    shutil.rmtree(run)
    found = {
        "seconds": sum(line["time/total_seconds"] for line in kept),
        "tokens": sum(line["batch/tokens"] for line in kept),
        "age": statistics.fmean(line["offpolicy/age_mean"] for line in kept),
        "wait_share": statistics.fmean(line["time/wait_share"] for line in kept),
    }
    print(
        f"lag {lag}: " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()), file=sys.stderr, flush=True
    )
    return found


def embedded(repeats: int, updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        pairs = [[train(Path(directory), lag, updates) for lag in (0, 1)] for _ in range(repeats)]
    per_token = [statistics.median(pair[lag]["seconds"] / pair[lag]["tokens"] for pair in pairs) for lag in (0, 1)]
    return {
        "lag_0_ms_per_trained_token": 1e3 * per_token[0],
        "lag_1_ms_per_trained_token": 1e3 * per_token[1],
        "ratio": per_token[1] / per_token[0],
        "lag_1_age_mean": statistics.median(pair[1]["age"] for pair in pairs),
        "lag_0_wait_share": statistics.median(pair[0]["wait_share"] for pair in pairs),
        "lag_1_wait_share": statistics.median(pair[1]["wait_share"] for pair in pairs),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a collection and of an update")
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--updates", type=int, default=10, help="of an embedded run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"apart": apart(args.repeats, args.seconds)}
    if args.embedded:
        found["embedded"] = embedded(args.repeats, args.updates)
    for part, values in found.items():
        print(f"{part:>9}: " + "  ".join(f"{name} {value:.3f}" for name, value in values.items()))
    print(f"apart: lag 1 takes {found['apart']['ratio']:.2f} of the time of lag 0 (goal: at most {GOAL})")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
