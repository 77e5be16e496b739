"""Where the samples of an update come from: a collection made for it, or what a producer has ready.

    Synchronous   asks, waits, trains: every token is of the version before the update, and a run repeats to the bit
    Overlapped    the producer goes on while the trainer trains: tokens are up to producer.max_policy_lag versions old

Both book every token, by the same rules. They run on the loop of `rlx.interrupt.Preemption`; the trainer's thread asks.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rlx import assemble
from rlx.config.schema import Config
from rlx.data.pipeline import TaskStream
from rlx.interrupt import Preemption
from rlx.metrics.jsonl import JsonlWriter, read_json
from rlx.metrics.ledger import Ledger
from rlx.rollout import journal, resume, timing
from rlx.rollout.buffer import Batch, Buffer
from rlx.rollout.collect import MakeEnvironment, check_begun, collect
from rlx.rollout.options import producer_options, rules
from rlx.rollout.producer import Producer
from rlx.rollout.report import take_scalars
from rlx.serving import Serving
from rlx.types import Count, Task

JOURNAL, TIMING = "journal", "timing.jsonl"


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What both kinds of feed are made of."""

    config: Config
    environments: MakeEnvironment
    serving: Serving
    stream: TaskStream
    ledger: Ledger
    preemption: Preemption


class Feed(Protocol):
    """Used in a `with` for the time of the loop. Its state is whole between `done` and the next `take`."""

    def __enter__(self) -> Feed: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self, version: int) -> Batch:
        """The samples of the next update of a learner of `version`; `done` follows."""
        ...

    def done(self, batch: Batch, applied: bool) -> None:
        """The update was made, or (not finite) was not."""
        ...

    def publish(self, weights: Any, version: int) -> None:
        """The engines serve `weights` as `version` from here on."""
        ...

    def scalars(self) -> dict[str, float]:
        """Metrics since the last call. Checks the books against what is really held."""
        ...

    def get_state(self, step: int) -> dict[str, Any]:
        """What a resumed run needs beside the stream's and the ledger's state, as `rlx.rollout.records` packs it: for
        checkpoint `step`. To be called on the loop, together with theirs; {} where there is nothing."""
        ...

    def kept(self, steps: Sequence[int]) -> None:
        """These checkpoints are still there: what only others need may go."""
        ...


class Synchronous:
    """See the module's docstring."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.buffer = Buffer(rules(parts.config, 0), parts.ledger)

    def __enter__(self) -> Synchronous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def take(self, version: int) -> Batch:
        return self.parts.preemption.run(self._collect(version))

    async def _collect(self, version: int) -> Batch:
        parts = self.parts
        instances = parts.stream.next_tasks(parts.config.rollout.tasks_per_update)
        asked = [(instance.group, instance.task) for instance in instances]
        sampling = assemble.sampling(parts.config)
        groups = await collect(parts.serving.engine, parts.environments, asked, sampling)
        check_begun(groups)
        samples = [s for g in groups for s in g.samples]
        parts.ledger.generated(sum(s.num_written for s in samples), len(samples), len(groups))
        for group in groups:
            self.buffer.put(group, version)
        self._taken = self.buffer.take_all(version)
        # Those without a verdict never were in the buffer, but belong into the run's records.
        return dataclasses.replace(self._taken, groups=tuple(groups))

    def done(self, batch: Batch, applied: bool) -> None:
        self.buffer.done(self._taken, applied)

    def publish(self, weights: Any, version: int) -> None:
        self.parts.preemption.finish(self.parts.serving.publish(weights, version))

    def scalars(self) -> dict[str, float]:
        parts = self.parts
        parts.ledger.check(self.buffer.holdings())
        return parts.ledger.scalars() | {"engine/occupancy": parts.preemption.call(parts.serving.occupancy)}

    def get_state(self, step: int) -> dict[str, Any]:
        return {}

    def kept(self, steps: Sequence[int]) -> None:
        return None


class Overlapped:
    """See the module's docstring.

    Args:
      directory: of the run; it gets journal/ and timing.jsonl.
      state: of `get_state`, to go on from with what the journal has beyond it; {} where nothing was saved; None: a
        fresh run, whatever the directory holds.
    """

    def __init__(self, parts: Parts, directory: Path, state: Mapping[str, Any] | None):
        if state is None:
            shutil.rmtree(directory / JOURNAL, ignore_errors=True)
            (directory / TIMING).unlink(missing_ok=True)
        config = parts.config
        self.parts = parts
        self.timing = JsonlWriter(directory / TIMING)
        self._update: dict[str, Any] = {}
        self.segments: dict[str, int] = {}  # checkpoint's step -> the journal's segment that begins with it
        self.fleet, self.publisher = parts.serving.fleet, parts.serving.publisher
        self.buffer = Buffer(rules(config, config.producer.max_policy_lag), parts.ledger)
        beyond = [] if state is None else list(journal.read(directory / JOURNAL, state.get("journal", 0)))
        self.journal = journal.Journal(directory / JOURNAL)
        self.producer = Producer(
            self.fleet,
            timing.timed_environments(parts.environments, self.trace),
            self._next_task,
            self.buffer,
            parts.ledger,
            assemble.sampling(config),
            producer_options(config, self.fleet.slots),
            self.journal,
        )
        if state is not None:
            parts.preemption.call(lambda: self._resume(state, beyond, read_json(directory / "ledger.json")))

    def _resume(self, state: Mapping[str, Any], beyond: list[journal.Entry], ledger: Mapping[str, Any]) -> None:
        if state:
            resume.set_state(self.producer, state["producer"])
            self.segments = dict(state["segments"])
        known = [Count(*ledger["generated"]), self.parts.ledger.total, *resume.recover(self.producer, beyond)]
        self.parts.ledger.book_lost(*known)

    def __enter__(self) -> Overlapped:
        self.parts.serving.trace = self.trace
        self.parts.preemption.finish(self.producer.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_update()
        self.parts.preemption.finish(self._close(failed=kind is not None))

    async def _close(self, failed: bool) -> None:
        """The engines go on serving, all of them the newest version, unless the run is given up."""
        await self.producer.stop()
        if not failed:
            await self.publisher.settled()
        self.parts.serving.trace = None
        self.journal.sync()
        self.timing.sync()

    def take(self, version: int) -> Batch:
        self._end_update()
        began = time.monotonic()
        batch = self.parts.preemption.run(self.buffer.take(version))
        tokens = sum(len(s.tokens) for s in batch.samples)
        self._update = {"kind": "update", "tokens": tokens, "began": began, "taken": time.monotonic()}
        return batch

    def done(self, batch: Batch, applied: bool) -> None:
        self.parts.preemption.call(lambda: self.buffer.done(batch, applied))
        self._update["trained"] = self._update["published"] = time.monotonic()

    def publish(self, weights: Any, version: int) -> None:
        self.parts.preemption.finish(self.publisher.publish(weights, version))
        self._update["published"] = time.monotonic()

    def _end_update(self) -> None:
        """An update is over, metrics and checkpoint written, when the next one begins."""
        if "trained" in self._update:
            record = {**self._update, "ended": time.monotonic()}
            self.parts.preemption.call(lambda: self.trace(record))
        self._update = {}

    def scalars(self) -> dict[str, float]:
        return self.parts.preemption.call(self._scalars)

    def _scalars(self) -> dict[str, float]:
        ledger = self.parts.ledger
        ledger.check(self.producer.holdings() | self.buffer.holdings())
        return ledger.scalars() | take_scalars(self.producer)

    def get_state(self, step: int) -> dict[str, Any]:
        segment = self.journal.rotate()
        self.segments[str(step)] = segment
        return {"journal": segment, "segments": self.segments, "producer": resume.get_state(self.producer)}

    def kept(self, steps: Sequence[int]) -> None:
        self.segments = {step: segment for step, segment in self.segments.items() if int(step) in steps}
        if self.segments:
            self.parts.preemption.call(lambda: self.journal.prune(min(self.segments.values())))

    def trace(self, record: Mapping[str, Any]) -> None:
        self.timing.append({"update": self.fleet.version, **record})

    def _next_task(self) -> tuple[int, Task]:
        (instance,) = self.parts.stream.next_tasks(1)
        return instance.group, instance.task
