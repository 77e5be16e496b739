"""One simulated run: the producer, fleet, buffer, publisher and ledger of a real one, on a virtual clock, with modelled
engines, sessions and trainer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
from collections.abc import Callable, Iterator

from rlx.config.errors import ConfigError
from rlx.config.profiles import admission
from rlx.config.schema import Config
from rlx.metrics.ledger import Ledger
from rlx.rollout import timing, virtual
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling
from rlx.rollout.fates import ages
from rlx.rollout.fleet import Fleet
from rlx.rollout.modelled import RESOLUTION, ModelledEngine
from rlx.rollout.modelled_sessions import Work
from rlx.rollout.options import fleet_options, producer_options, rules
from rlx.rollout.producer import Producer
from rlx.rollout.timing import Trace
from rlx.simulation.observe import Meter, Timeline, Update
from rlx.simulation.result import Result, summarise
from rlx.sync.publisher import Publisher
from rlx.types import Task


def simulate(config: Config, trace: Trace | None = None) -> Result:
    """What a run with these settings would do. The same configuration gives the same result.

    Args:
      trace: gets the records of `rlx.rollout.timing`, as a real run writes them.
    Raises:
      ConfigError: for what cannot be simulated. FleetDown: the modelled faults leave no engine.
    """
    check(config)
    with _rare_collection():
        return virtual.run(_Simulation(coarse(config), trace).run())


def check(config: Config) -> None:
    """Raises ConfigError for what cannot be simulated, as far as it can be known before."""
    if config.learner.updates <= config.metrics.skip_updates:
        raise ConfigError(
            f"config.learner.updates = {config.learner.updates}: the first {config.metrics.skip_updates} "
            "(config.metrics.skip_updates) are left out of every figure; simulate more updates than those"
        )


@contextlib.contextmanager
def _rare_collection() -> Iterator[None]:
    """A hundred thousand sessions are millions of objects, and hardly any of them is in a cycle: looking for cycles as
    often as usual would take as long as all the rest."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def coarse(config: Config) -> Config:
    """The configuration with every length in tokens of the simulation."""
    grain = config.simulate.token_grain

    def fewer(tokens: int) -> int:
        return -(-tokens // grain)

    engines = config.simulate.engines
    engines = dataclasses.replace(
        engines,
        step_seconds=engines.step_seconds * grain,
        step_seconds_per_request=engines.step_seconds_per_request * grain,
        prefill_tokens_per_s=engines.prefill_tokens_per_s / grain,
    )
    producer, rollout = config.producer, config.rollout
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(rollout, max_new_tokens=fewer(rollout.max_new_tokens)),
        engine=dataclasses.replace(config.engine, context=fewer(config.engine.context)),
        learner=dataclasses.replace(config.learner, row_tokens=fewer(config.learner.row_tokens)),
        producer=dataclasses.replace(
            producer,
            session_token_limit=fewer(producer.session_token_limit),
            train_token_limit=fewer(producer.train_token_limit),
        ),
        simulate=dataclasses.replace(config.simulate, engines=engines),
    )


class _Simulation:
    def __init__(self, config: Config, trace: Trace | None):
        self.config, self.trace = config, trace
        simulate, producer = config.simulate, config.producer
        self.work = Work(simulate.sessions, simulate.faults, config.run.seed, simulate.token_grain)
        self.meter = Meter()
        self.engines = [self._engine(f"engine{i}") for i in range(simulate.engines.count)]
        self.ledger = Ledger()
        replicas = self.engines if trace is None else [timing.TimedReplica(e, trace) for e in self.engines]
        self.fleet = Fleet(replicas, fleet_options(config), None, 0, self.ledger)
        self.buffer = Buffer(rules(config, producer.max_policy_lag), self.ledger)
        make = self.work.environment if trace is None else timing.timed_environments(self.work.environment, trace)
        self.producer = Producer(
            self.fleet,
            make,
            tasks(simulate.sessions.tasks),
            self.buffer,
            self.ledger,
            sampling(config),
            producer_options(config, self.fleet.slots),
        )
        self.publisher = Publisher(self.fleet, producer.publication)
        self.updates: list[Update] = []
        self.version = 0
        self.timeline = Timeline(
            {
                "engines": lambda: self.meter.level / self.fleet.slots,
                "sessions": lambda: self.producer.sessions.level,
                "groups": lambda: len(self.buffer),
            }
        )

    def _engine(self, name: str) -> ModelledEngine:
        config = self.config
        return ModelledEngine(
            name,
            config.simulate.engines,
            self.work,
            admission=config.producer.engine_admission or admission(config),
            context=config.engine.context,
            on_change=self.meter.add,
        )

    async def run(self) -> Result:
        """The trainer's loop."""
        await asyncio.sleep(self.config.simulate.engines.start_seconds)
        beside = [asyncio.create_task(self.timeline.watch()), *self._faults()]
        busy = [0.0]  # slot-seconds at the end of each update
        try:
            async with self.fleet, self.producer:
                for _ in range(self.config.learner.updates):
                    self.updates.append(await self._update())
                    self.ledger.check(self.producer.holdings() | self.buffer.holdings())
                    busy.append(self.meter.area())
                session_seconds = self.producer.sessions.take().get("seconds", 0.0)
                await self.publisher.settled()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        first = self.config.metrics.skip_updates
        span = self.updates[-1].ended - self.updates[first].began
        occupancy = (busy[-1] - busy[first]) / (span * self.fleet.slots)
        return summarise(
            self.config, self.updates, self.ledger, self.timeline, occupancy=occupancy, session_seconds=session_seconds
        )

    async def _update(self) -> Update:
        trainer = self.config.simulate.trainer
        began = timing.now()
        batch = await self.buffer.take(self.version)
        taken = timing.now()
        tokens = sum(len(s.tokens) for s in batch.samples) * self.config.simulate.token_grain
        if batch.samples:
            self._slow_engines(trainer.engine_slowdown)
            await self._train(trainer.update_seconds + trainer.seconds_per_token * tokens)
            self._slow_engines(1.0)
            self.version += 1
        trained = timing.now()
        self.buffer.done(batch, applied=True)
        if batch.samples:
            await asyncio.sleep(trainer.publish_seconds)
            await self.publisher.publish(None, self.version)
        published = timing.now()
        await asyncio.sleep(trainer.other_seconds)
        by_age = ages(batch.samples, batch.version)
        update = Update(
            *(began, taken, trained, published, timing.now()),
            tokens=tokens,
            trained_tokens=by_age.total() * self.config.simulate.token_grain,
            samples=len(batch.samples),
            groups=len(batch.groups),
            ages=by_age,
        )
        if self.trace is not None:
            times = {name: getattr(update, name) for name in ("began", "taken", "trained", "published", "ended")}
            self.trace({"kind": "update", "tokens": tokens, **times})
        return update

    async def _train(self, work: float) -> None:
        """work: seconds of a device that nobody else uses."""
        slowdown = self.config.simulate.trainer.own_slowdown
        if slowdown == 1.0:
            await asyncio.sleep(work)
            return
        while work > 0:
            began, factor = timing.now(), slowdown if self.meter.level else 1.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.meter.turned(), work * factor)
            work = 0.0 if (left := work - (timing.now() - began) / factor) < RESOLUTION else left

    def _slow_engines(self, factor: float) -> None:
        if self.config.simulate.trainer.engine_slowdown != 1.0:
            for engine in self.engines:
                engine.slow_down(factor)

    def _faults(self) -> list[asyncio.Task[None]]:
        if not self.config.simulate.faults.engine_failures_per_hour:
            return []
        draw = random.Random(self.config.run.seed)
        return [asyncio.create_task(self._fail_now_and_then(e, draw.random())) for e in self.engines]

    async def _fail_now_and_then(self, engine: ModelledEngine, seed: float) -> None:
        faults, draw = self.config.simulate.faults, random.Random(seed)
        while True:
            await asyncio.sleep(draw.expovariate(faults.engine_failures_per_hour / 3600))
            engine.fail()
            await asyncio.sleep(faults.engine_down_seconds)
            engine.recover()


# ------------------------------------------------------------------------------ what the configuration says to the core


def tasks(count: int) -> Callable[[], tuple[int, Task]]:
    """The stream of a run: all tasks in turn, without end."""
    numbers = itertools.count()

    def next_task() -> tuple[int, Task]:
        group = next(numbers)
        number = group % count
        return group, Task(f"task/{number}", "task", "", None, "modelled", {"number": number})

    return next_task


def sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        group_size=rollout.group_size,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        zero_reward_truncated=rollout.truncated == "zero_reward",
        seed=config.run.seed,
    )
