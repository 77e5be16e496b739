"""Whole runs on virtual time: scripted engines, graders and environments with faults, a trainer that only sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.metrics.ledger import Count, Ledger
from rlx.rollout import virtual
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Batch, Buffer
from rlx.rollout.collect import Sampling
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.journal import Journal
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.rollout.session import Environment, TaskEnvironment
from rlx.sync.publisher import Mode, Publisher
from rlx.types import Sample, Task
from tests.rollout.scripted import Conversation, Graders, ScriptedEngine, Tokenizer, tasks, written_by


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens in a run. Faults are by number: of an engine's requests, its loads, gradings, environment calls."""

    engines: int = 2
    admission: int = 2
    mode: Mode = "refresh"
    group_size: int = 3
    collection: int = 2
    lag: int = 2
    sessions: int = 8
    samples: int = 12
    updates: int = 4
    train_s: float = 0.15
    turns: int = 1
    session_token_limit: int = 0
    train_token_limit: int = 1000
    cut_long: bool = False
    mask_truncated: bool = False
    filter_no_signal: bool = True
    return_stale: bool = True
    head_size: int = 0
    seed: int = 0
    faults: dict[int, dict[int, str]] = dataclasses.field(default_factory=dict)
    bad_loads: dict[int, dict[int, str]] = dataclasses.field(default_factory=dict)
    grader_faults: dict[int, str] = dataclasses.field(default_factory=dict)
    environment_faults: dict[int, str] = dataclasses.field(default_factory=dict)
    failure_limit: int = 100
    retries: int = 2
    recalls: bool = False


class Watched(Ledger):
    """Writes down what is booked, and has `check` called once all that belongs to it has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[Any, ...]] = []
        self.check_soon: Callable[[], None] = lambda: None
        self._due = False

    def generated(self, tokens, samples=0, groups=0, into="in_flight"):
        super().generated(tokens, samples, groups, into)
        self._note("generated", tokens, samples, groups)

    def move(self, source, target, tokens, samples=0, groups=0, **profile):
        super().move(source, target, tokens, samples, groups, **profile)
        self._note(source, target, tokens, samples, groups)

    def _note(self, *event):
        loop = asyncio.get_running_loop()
        self.trace.append((round(loop.time(), 6), *event))
        if not self._due:  # once for all that is booked in one step of the loop
            self._due = True
            loop.call_soon(self._check)

    def _check(self):
        self._due = False
        self.check_soon()


@dataclasses.dataclass(eq=False)
class World:
    """The parts of one run."""

    plan: Plan
    ledger: Watched
    engines: list[ScriptedEngine]
    graders: Graders
    buffer: Buffer
    fleet: Fleet
    producer: Producer
    publisher: Publisher
    batches: list[Batch]
    version: int = 0
    error: BaseException | None = None

    def holdings(self) -> dict[str, Count]:
        return self.producer.holdings() | self.buffer.holdings()

    def check(self) -> None:
        try:
            self.ledger.check(self.holdings())
        except BaseException as error:
            self.error = self.error or error


def build(plan: Plan, journal: Journal | None = None, next_task: Callable[[], tuple[int, Task]] | None = None) -> World:
    """On a running loop."""
    ledger = Watched()
    engines = [
        ScriptedEngine(
            f"e{i}",
            admission=plan.admission,
            head_size=plan.head_size,
            faults=plan.faults.get(i),
            bad_loads=plan.bad_loads.get(i, {}).get,
            recalls=plan.recalls,
        )
        for i in range(plan.engines)
    ]
    rules = Rules(
        plan.collection, plan.lag, plan.filter_no_signal, plan.mask_truncated, plan.train_token_limit, plan.cut_long,
        plan.return_stale,
    )  # fmt: skip
    buffer = Buffer(rules, ledger)
    options = FleetOptions(request_timeout_s=2.0, load_timeout_s=1.0, backoff_s=0.1, outage_s=20.0)
    fleet = Fleet(engines, options, "weights 0", 0, ledger)
    graders = Graders(faults=plan.grader_faults.get)
    producer = Producer(
        fleet,
        environments(plan, graders),
        next_task or tasks(),
        buffer,
        ledger,
        Sampling(plan.group_size, 12, 1.0, False, plan.seed),
        ProducerOptions(
            Budgets(plan.sessions, plan.samples, plan.collection),
            gradings=2,
            session_token_limit=plan.session_token_limit,
            environment_timeout_s=1.0,
            retries=plan.retries,
            backoff_s=0.1,
            failure_limit=plan.failure_limit,
        ),
        journal,
    )
    world = World(plan, ledger, engines, graders, buffer, fleet, producer, Publisher(fleet, plan.mode), [])
    ledger.check_soon = world.check
    return world


def environments(plan: Plan, graders: Graders) -> Callable[[Task], Environment]:
    tokenizer, calls = Tokenizer(), iter(range(10**9))
    if plan.turns == 1:
        return lambda task: TaskEnvironment(task, graders, tokenizer)
    return lambda task: Conversation(task, turns=plan.turns, faults=lambda _: plan.environment_faults.get(next(calls)))


async def train(world: World, updates: int) -> None:
    """The trainer's loop."""
    plan = world.plan
    for _ in range(updates):
        batch = await world.buffer.take(world.version)
        world.batches.append(batch)
        await asyncio.sleep(plan.train_s)
        world.buffer.done(batch, applied=True)
        world.version += 1
        await world.publisher.publish(f"weights {world.version}", world.version)
        if world.error is not None:
            raise world.error


def run(plan: Plan) -> World:
    """To the end, or to the error that ended it, which the world then has."""

    async def main() -> World:
        world = build(plan)
        async with world.fleet, world.producer:
            try:
                await train(world, plan.updates)
                await world.publisher.settled()
            except BaseException as error:
                world.error = world.error or error
            await world.publisher.close()
        await asyncio.sleep(0)
        world.check()
        return world

    return virtual.run(main())


def problems(world: World) -> list[str]:
    """What must never be, whatever happened in the run."""
    numbers = [sample.group for batch in world.batches for sample in batch.samples]
    groups = [group.samples[0].group for batch in world.batches for group in batch.groups]
    found = [f"group {g} twice" for g in set(groups) if groups.count(g) > 1]
    found += ["a sample of no group taken"] if set(numbers) - set(groups) else []
    for batch in world.batches:
        for sample in batch.samples:
            found += sample_problems(sample, batch.version, world.plan)
    by_age = world.ledger.get_state()["tokens_by_age"].get("trained", [])
    if sum(by_age) != world.ledger["trained"].tokens:
        found.append("ages of the trained tokens that do not add up")
    return found


def sample_problems(sample: Sample, version: int, plan: Plan) -> list[str]:
    written = written_by(sample.logprobs)
    recorded = np.full(len(sample.tokens), -1)
    for span in sample.version_spans:
        recorded[span.start : span.end] = span.version
    name, found = f"sample {sample.index} of group {sample.group}", []
    if not np.array_equal(recorded >= 0, sample.mask):
        found.append(f"{name}: spans that are not those of the written tokens")
    if not np.array_equal(recorded[sample.mask], written[sample.mask]):
        found.append(f"{name}: written by {written[sample.mask]}, recorded as {recorded[sample.mask]}")
    if (version - written[sample.mask]).max() > plan.lag:
        found.append(f"{name}: older than {plan.lag}")
    if plan.mode in ("barrier", "drain") and plan.turns == 1 and len({*written[sample.mask]}) > 1 and not plan.faults:
        found.append(f"{name}: versions mixed in a response under {plan.mode}")
    if len(sample.tokens) > plan.train_token_limit:
        found.append(f"{name}: {len(sample.tokens)} tokens, over the limit")
    if plan.head_size and len(sample.head.ids) != sample.num_written:
        found.append(f"{name}: a head of {len(sample.head.ids)} rows")
    return found
