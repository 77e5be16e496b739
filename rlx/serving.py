"""The engines of a run: the embedded one, or SGLang servers that are started here or given by their addresses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlx import assemble, bridges
from rlx.config.schema import Config
from rlx.interrupt import Preemption
from rlx.metrics.ledger import Ledger
from rlx.rollout import engine_state, servers
from rlx.rollout.engine import Engine
from rlx.rollout.fleet import Fleet
from rlx.rollout.health import watch
from rlx.rollout.options import fleet_options
from rlx.rollout.persistent import Persistent
from rlx.rollout.server_checks import check_server
from rlx.rollout.server_options import client, engine_options, server_fleet_options, server_specs
from rlx.rollout.sglang import SglangEngine
from rlx.rollout.sglang_http import SglangHttp
from rlx.rollout.supervisor import Group
from rlx.rollout.timing import TimedReplica, Trace
from rlx.sync.bridge import Bridge, Link
from rlx.sync.lora import AdapterBridge, AdapterLink
from rlx.sync.publisher import Publisher
from rlx.sync.staging import Staging

Prepare = Callable[[Any, int], Awaitable[Any]]


@dataclasses.dataclass
class Serving:
    """What a run asks and publishes to. Its coroutines run on the loop of `rlx.interrupt.Preemption`.

    engine: for collections and evaluations; of servers, one that asks again where one of them fails.
    occupancy: since it was asked last (servers) or since the start; a producer asks by itself.
    staging: of what is published, None where that is not staged, or an adapter.
    trace: gets the records of answers and loads (`rlx.rollout.timing`) once somebody wants them.
    """

    engine: Engine
    fleet: Fleet
    publisher: Publisher
    occupancy: Callable[[], float]
    servers: tuple[SglangEngine, ...] = ()
    prepare: Prepare | None = None
    staging: Staging | None = None
    trace: Trace | None = None

    def record(self, record: Mapping[str, Any]) -> None:
        if self.trace is not None:
            self.trace(record)

    async def replace(self, weights: Any) -> None:
        """Serve other weights under the version that is served; nothing may be running. Raises EngineError."""
        fleet = self.fleet
        fleet.weights = weights if self.prepare is None else await self.prepare(weights, fleet.version)
        await asyncio.gather(*(fleet.load(member) for member in fleet.members))

    async def publish(self, weights: Any, version: int) -> None:
        """Serve `weights` as `version` on every engine in service; returns when they do."""
        await self.publisher.publish(weights, version)
        await self.publisher.settled()

    def served(self) -> list[SglangEngine]:
        """The servers in service."""
        out = {member.engine.name for member in self.fleet.members if not member.in_service}
        return [server for server in self.servers if server.name not in out]


# ------------------------------------------------------------------------------------------------------------- embedded


def embedded(config: Config, model: assemble.Model, policy: Any, version: int, ledger: Ledger) -> Serving:
    """The engine in this process."""
    engine = assemble.make_engine(config, model, policy, version)
    return around(config, engine, policy, version, ledger)


def around(config: Config, engine: Any, policy: Any, version: int, ledger: Ledger) -> Serving:
    """A `LocalEngine`, or what stands for one."""
    serving: Serving
    timed = TimedReplica(engine, lambda record: serving.record(record))
    fleet = Fleet([timed], fleet_options(config), policy, version, ledger)
    publisher = Publisher(fleet, config.producer.publication)
    serving = Serving(engine, fleet, publisher, lambda: engine.stats.occupancy)
    return serving


# -------------------------------------------------------------------------------------------------------------- servers


@contextlib.contextmanager
def started_servers(config: Config, directory: Path) -> Iterator[Group | None]:
    """The servers that `config` starts on this machine, which are still starting; None where it starts none."""
    if config.engine.kind != "sglang" or not config.inference.count:
        yield None
        return
    with Group(server_specs(config, directory / "engines"), config.producer.backoff_s) as group:
        write_state(directory, group)
        yield group


def write_state(directory: Path, group: Group) -> None:
    """For `rlx engines status --state=RUN/engines.json`."""
    engine_state.write(directory / "engines.json", group.servers, engine_state.process(os.getpid()))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where engines run and what runs them. group: servers that were started here, None where there are none."""

    directory: Path  # of the run
    group: Group | None
    preemption: Preemption


@contextlib.contextmanager
def open_serving(
    config: Config,
    model: assemble.Model,
    trainable: Any,
    version: int,
    ledger: Ledger,
    place: Place,
) -> Iterator[Serving]:
    """The engines of a run; they serve the policy of `trainable`, a learner's, as `version`.

    Raises:
      ServerFailed: a server that does not start; with its last words.
      ConfigError: one that is there and cannot do what is asked; an adapter that is not published by itself.
      EngineError: one that cannot be reached, or does not take the weights. AuditFailed: not all of them.
    """
    group, preemption = place.group, place.preemption
    bridges.check_adapters(config, model)  # before minutes are spent on servers
    staging = bridges.make_staging(config, model, place.directory)
    policy = bridges.published(config, model, trainable, version, staging)
    if config.engine.kind == "local":
        serving = embedded(config, model, policy, version, ledger)
        with _ending(lambda: preemption.finish(_close(serving, []))):
            yield serving
        return
    if group is not None:
        servers.wait_ready(group.servers, config.inference.ready_timeout_s, preemption.check)
    bridge = bridges.make_bridge(config, model, place.directory, staging)
    urls = list(config.inference.addresses) if group is None else group.urls
    links = [bridge.link() for _ in urls]
    engines = [_engine(config, model, url, link, version) for url, link in zip(urls, links, strict=True)]
    asked = [_behind(config, engines)] if config.inference.router else engines
    with _ending(lambda: preemption.finish(_disconnect(dict.fromkeys([*engines, *asked]), bridge))):
        serve = _serve(config, engines, asked, bridge, policy, version, ledger, place)
        serving, keepers = preemption.finish(serve)
        serving.staging = staging
        with _ending(lambda: preemption.finish(_close(serving, keepers))):
            if config.audit.at_start:
                preemption.finish(bridges.audit_transport(engines, links, serving.fleet.weights, version))
            yield serving


@contextlib.contextmanager
def _ending(end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` when its body is left. What the body raised is what goes on, with a note of what `end` did."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as failure:
            error.add_note(f"and then, while engines were let go: {failure!r}")
        raise
    end()


def _engine(config: Config, model: assemble.Model, url: str, link: Link | AdapterLink, version: int) -> SglangEngine:
    stop_ids = tuple(model.tokenizer.stop_token_ids)
    options = engine_options(config, model.arch.vocab_size, assemble.head_size(config), stop_ids)
    return SglangEngine(client(config, url), options, link, version=version)


async def _serve(
    config: Config,
    engines: list[SglangEngine],
    asked: list[SglangEngine],
    bridge: Bridge | AdapterBridge,
    policy: Any,
    version: int,
    ledger: Ledger,
    place: Place,
) -> tuple[Serving, list[asyncio.Task[None]]]:
    """Every server checked and given the weights; from here on they are watched. asked: they, or their router."""
    for engine in engines:
        check_server(config, engine.name, await engine.served(), given=place.group is None)
    serving: Serving
    timed = [TimedReplica(engine, lambda record: serving.record(record)) for engine in asked]
    staged = await bridge.prepare(policy, version)
    fleet = Fleet(timed, server_fleet_options(config), staged, version, ledger)
    producer = config.producer
    serving = Serving(
        engine=Persistent(fleet, ledger, producer.retries, producer.backoff_s),
        fleet=fleet,
        publisher=Publisher(fleet, producer.publication, bridge.prepare),
        servers=tuple(engines),
        occupancy=lambda: fleet.busy.take()["occupancy"] / fleet.slots,
        prepare=bridge.prepare,
    )
    await asyncio.gather(*(fleet.load(member) for member in fleet.members))
    keepers = [
        watch(fleet, m, _probe(config, e.http), config.inference.health_every_s) for m, e in zip(fleet.members, asked)
    ]
    if (group := place.group) is not None:
        written = partial(write_state, place.directory, group)
        ended = [partial(fleet.eject, member, "ended") for member in fleet.members]
        keepers += [group.keep(i, said, written) for i, said in enumerate(ended)]
    tasks = [asyncio.get_running_loop().create_task(keeper) for keeper in keepers]
    for task in tasks:
        task.add_done_callback(_report)
    return serving, tasks


def _report(keeper: asyncio.Task[None]) -> None:
    """At once, to the log: `_close`, which raises it, may be hours away."""
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        said = {"message": "an engine is not watched any more", "exception": error, "task": keeper}
        keeper.get_loop().call_exception_handler(said)


def _probe(config: Config, http: SglangHttp) -> Callable[[], Awaitable[object]]:
    return partial(http.get, "/health", timeout_s=config.inference.health_timeout_s)


def _behind(config: Config, workers: list[SglangEngine]) -> SglangEngine:
    """A router as one engine: requests go to it, weights to each of the servers behind it, all or nothing."""

    async def load(http: SglangHttp, weights: Any, version: int) -> None:
        await asyncio.gather(*(worker.load(weights, version) for worker in workers))

    options = workers[0].options
    admission, in_flight = len(workers) * options.admission, len(workers) * options.in_flight
    options = dataclasses.replace(options, admission=admission, in_flight=in_flight)
    return SglangEngine(client(config, config.inference.router), options, load, version=workers[0].version)


async def _close(serving: Serving, keepers: list[asyncio.Task[None]]) -> None:
    """Ends what the run has under way. Raises what a keeper failed with: nobody was watching since."""
    for keeper in keepers:
        keeper.cancel()
    ended = await asyncio.gather(*keepers, return_exceptions=True)
    try:
        await serving.publisher.close()
    finally:
        await serving.fleet.__aexit__(None, None, None)
    failures = [error for error in ended if isinstance(error, Exception)]
    if failures:
        raise ExceptionGroup("engines were not watched", failures)


async def _disconnect(engines: Iterable[SglangEngine], bridge: Bridge | AdapterBridge) -> None:
    """Nothing of the run asks a server for anything when this returns, whatever it raises."""
    async with contextlib.AsyncExitStack() as closing:
        for engine in engines:
            closing.push_async_callback(engine.close)
        closing.push_async_callback(bridge.close)  # the first of them: it may still ask engines for something
