"""What the asynchronous path costs the host: CPU time a sample, tokens a second on one core, memory a buffered token.

    python -m bench.async_overhead [--repeats 5]
    python -m bench.async_overhead --live 20 [--rate 20000]

The real producer, fleet, buffer and ledger on virtual time, so that what is measured is their computing and nothing
else, with engines that answer after a fixed time with ready arrays. Three parts:

    cost     CPU time a sample with 64, 1,024 and 8,192 sessions in flight, 64 an engine; medians of interleaved runs.
             Responses of 512 tokens with top-128 heads, and of 16 tokens without: what is left of a sample's cost
    rate     of the former with 1,024 sessions: tokens that one core takes in a CPU second
    memory   bytes held, and at the peak, for each token in a buffer of 128 groups; payload is 8 + 8 K bytes

With --live the same on the real clock for so many seconds, twice: engines that write `--rate` tokens a second in 1,024
sessions, and a trainer that takes their groups. First the CPU time as a share of one core, then, with every allocation
traced and the trainer behind, so that the buffer fills, the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
import tracemalloc
from typing import Any, NamedTuple

import numpy as np

from rlx.envs.grading import Grade, Outcome
from rlx.metrics.ledger import Ledger
from rlx.rollout import virtual
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling
from rlx.rollout.engine import Completion, Request
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.rollout.session import TaskEnvironment
from rlx.types import StopReason, Task, TopK, VersionSpan

GROUP, LENGTH, HEAD, SLOTS, VOCAB = 8, 512, 128, 64, 1 << 17
SESSIONS = (64, 1024, 8192)
RATE_GOAL, MEMORY_GOAL, COST_GOAL = 20_000, 1.10, 1.25


class ReadyEngine:
    """Answers after `seconds` with copies of ready arrays; spread: its first answers come at any time before that, as
    if it had been running for long."""

    version = 0

    def __init__(self, name: str, length: int, head: int, seconds: float, spread: bool = False):
        self.name, self.admission, self.seconds, self._spread = name, SLOTS, seconds, SLOTS * spread
        self._spans = (VersionSpan(0, 0, length),)
        self._tokens, self._logprobs = np.arange(length, dtype=np.int32), np.full(length, -1.0, np.float32)
        columns = np.arange(head, dtype=np.int32)
        self._ids = (self._tokens[:, None] + columns) % VOCAB if head else None
        self._head = np.full((length, head), -np.log(4 * HEAD), np.float32)
        self._head[:, :1] = -1.0

    async def generate(self, request: Request) -> list[Completion]:
        drawn = request.seeds[0] / 2**32
        self._spread -= self._spread > 0
        await asyncio.sleep(self.seconds * (drawn if self._spread else 0.75 + drawn / 2))
        head = None if self._ids is None else TopK(self._ids.copy(), self._head.copy())
        tokens, logprobs = self._tokens.copy(), self._logprobs.copy()
        return [Completion(tokens, logprobs, head, self._spans, StopReason.STOP)]

    async def load(self, weights: Any, version: int, /) -> None:
        self.version = version


class Text:
    def encode_prompt(self, question: str) -> np.ndarray:
        return np.arange(32, dtype=np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return "text"


class InstantGraders:
    def grade(self, task: Task, text: str) -> asyncio.Future[Grade]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Grade(1.0, "", "", 0.0, Outcome.GRADED))
        return future


def endless():
    number = 0
    while True:
        yield number, Task(f"t/{number}", "t", "question", "1", "exact")
        number += 1


async def produce(sessions: int, collection: int, takes: int, length: int, head: int, fill: bool = False) -> Any:
    """CPU seconds of `takes` collections after a first one; with `fill` the buffer, full, with nothing under way."""
    ledger = Ledger()
    buffer = Buffer(Rules(collection, 10**6, False, False, 10**6, False, False), ledger)
    engines = [ReadyEngine(f"e{i}", length, head, 10.0) for i in range(max(1, sessions // SLOTS))]
    graders, text, tasks = InstantGraders(), Text(), endless()
    options = ProducerOptions(Budgets(sessions, 2 * sessions, collection), gradings=64)
    async with (
        Fleet(engines, FleetOptions(), None, 0, ledger) as fleet,
        Producer(
            fleet,
            lambda task: TaskEnvironment(task, graders, text),
            lambda: next(tasks),
            buffer,
            ledger,
            Sampling(GROUP, length, 1.0, False, 0),
            options,
        ) as producer,
    ):
        start = 0.0
        for take in range(takes + 1):
            buffer.done(await buffer.take(0), applied=True)
            start = time.process_time() if take == 0 else start
        seconds = time.process_time() - start
        ledger.check(producer.holdings() | buffer.holdings())
        while fill and (producer.open or not buffer.full):
            await asyncio.sleep(10)
    return buffer if fill else seconds


def cost(sessions: int, length: int, head: int) -> float:
    """CPU microseconds a sample: of as many as there are sessions, or 2,048."""
    groups = 64
    takes = max(4, sessions // (groups * GROUP))
    return virtual.run(produce(sessions, groups, takes, length, head)) / (takes * groups * GROUP) * 1e6


def memory() -> tuple[float, float]:
    """Bytes a buffered token: held by the buffer, and at the peak of filling it with a few sessions."""
    tracemalloc.start()
    buffer = virtual.run(produce(16, 128, 0, 256, HEAD, fill=True))
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = buffer.holdings()["buffered"].tokens
    return held / tokens, peak / tokens


class Sight(NamedTuple):
    """What was seen of a live run after its first answers."""

    seconds: float
    cpu_seconds: float
    tokens: int  # generated
    held: int  # tokens, at the end
    peak: int  # of the same, at any look
    bytes_peak: int  # traced; 0 where nothing was


async def live(seconds: float, rate: float, *, fill: bool) -> Sight:
    """1,024 sessions on the real clock. fill: nothing is trained, and memory is traced."""
    sessions, length, collection = 1024, 256, 64
    lasts = sessions * length / rate  # a response
    ledger, everything = Ledger(), 1 << 20
    buffer = Buffer(Rules(everything if fill else collection, 10**6, False, False, 10**6, False, False), ledger)
    engines = [ReadyEngine(f"e{i}", length, HEAD, lasts, spread=True) for i in range(sessions // SLOTS)]
    graders, text, tasks = InstantGraders(), Text(), endless()
    options = ProducerOptions(Budgets(sessions, 2 * sessions, everything if fill else collection), gradings=64)
    make = lambda task: TaskEnvironment(task, graders, text)  # noqa: E731
    sampling = Sampling(GROUP, length, 1.0, False, 0)
    fleet = Fleet(engines, FleetOptions(), None, 0, ledger)
    producer = Producer(fleet, make, lambda: next(tasks), buffer, ledger, sampling, options)

    async def train() -> None:
        while True:
            buffer.done(await buffer.take(0), applied=True)

    async with fleet, producer:
        trainer = None if fill else asyncio.create_task(train())
        await asyncio.sleep(lasts)
        wall, cpu, before, peak = time.monotonic(), time.process_time(), ledger.total.tokens, 0
        while (spent := time.monotonic() - wall) < seconds:
            await asyncio.sleep(0.5)
            peak = max(peak, sum(ledger[name].tokens for name in ("in_flight", "buffered")))
        cpu = time.process_time() - cpu
        tokens = ledger.total.tokens - before
        ledger.check(producer.holdings() | buffer.holdings())
        held = sum(count.tokens for count in (producer.holdings() | buffer.holdings()).values())
        traced = tracemalloc.get_traced_memory()[1] if fill else 0
        if trainer is not None:
            trainer.cancel()
    return Sight(spent, cpu, tokens, held, peak, traced)


def report_live(seconds: float, rate: float) -> None:
    busy = asyncio.run(live(seconds, rate, fill=False))
    share, achieved = busy.cpu_seconds / busy.seconds, busy.tokens / busy.seconds
    print(f"1,024 sessions, K = {HEAD}, real clock, {busy.seconds:.0f} s: {achieved:,.0f} tokens/s", flush=True)
    print(f"they take {share:.1%} of one core; at most {busy.peak:,} tokens were held", flush=True)
    tracemalloc.start()
    full = asyncio.run(live(seconds, rate, fill=True))
    tracemalloc.stop()
    payload = 8 + 8 * HEAD
    each = full.bytes_peak / full.held
    print(
        f"memory: {full.bytes_peak / 2**20:,.0f} MiB at the peak for {full.held:,} tokens held: {each:.0f} bytes each, "
        f"{each / payload:.3f} of the payload of {payload} (goal {MEMORY_GOAL})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--live", type=float, metavar="SECONDS", help="measure on the real clock instead")
    parser.add_argument("--rate", type=float, default=float(RATE_GOAL), help="tokens a second of a live run")
    args = parser.parse_args()
    if args.live:
        report_live(args.live, args.rate)
        return
    repeats = args.repeats
    kinds = {f"{LENGTH} tokens, K = {HEAD}": (LENGTH, HEAD), "16 tokens, no head": (16, 0)}
    costs: dict[tuple[str, int], list[float]] = {(kind, n): [] for kind in kinds for n in SESSIONS}
    for _ in range(repeats):
        for kind, sessions in costs:
            costs[kind, sessions].append(cost(sessions, *kinds[kind]))
    medians = {key: statistics.median(values) for key, values in costs.items()}
    print("response               | sessions | CPU us a sample | of 64's")
    for (kind, sessions), median in medians.items():
        print(f"{kind:22} | {sessions:8,} | {median:15.0f} | {median / medians[kind, SESSIONS[0]]:7.2f}")
    print(f"(the goal for the first three is {COST_GOAL})")
    rate = LENGTH / medians[next(iter(kinds)), 1024] * 1e6
    print(f"1,024 sessions, K = {HEAD}: {rate:,.0f} tokens a CPU second (goal {RATE_GOAL:,})")
    held, peak = memory()
    payload = 8 + 8 * HEAD
    print(f"memory a buffered token: {held:.0f} bytes held, {peak:.0f} at the peak; payload {payload}")
    print(f"of the payload: {held / payload:.3f} held, {peak / payload:.3f} at the peak (goal {MEMORY_GOAL})")


if __name__ == "__main__":
    main()
