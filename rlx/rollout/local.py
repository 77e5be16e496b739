"""The embedded engine: continuous batching on the model's own sampler, in the trainer's process.

The host side keeps a queue of samples, the owner of each slot and what is written; the device side is
`rlx.models.sampler`. Samples are admitted in the order they were asked for, into the lowest free slots, so a run that
asks in a fixed order is reproducible to the bit. Weights are swapped between two dispatches, never during one; running
responses go on with the new weights, their cache computed anew, and the version of every token is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlx.config.schema import EngineConfig
from rlx.models import sampler
from rlx.models.prompts import PromptCache
from rlx.models.sampler import SamplerConfig
from rlx.models.spec import Architecture, Params
from rlx.rollout.engine import Completion, EngineError, Request, check_request
from rlx.rollout.pending import Pending, Written
from rlx.types import StopReason

_NARROWEST = 16  # slots that are worth a program of their own
# One program: piece by piece they compile for a third of a second.
empty_slots = jax.jit(sampler.init_slots, static_argnums=(0, 1, 2, 3))
_LOOK_AHEAD = 512  # samples of the queue among which prompts are looked for that fill a prefill


@dataclasses.dataclass
class EngineStats:
    """Totals since the engine was made."""

    prompt_tokens: int = 0  # prefilled, once for all samples that wait for a prompt
    new_tokens: int = 0
    aborted_tokens: int = 0  # of these, of samples that were cancelled or failed
    dispatches: int = 0
    steps: int = 0  # decoding steps, in all dispatches
    slot_steps: int = 0  # slots decoded, in all steps
    busy_slot_steps: int = 0  # of these, slots that wrote a token

    @property
    def occupancy(self) -> float:
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0


class FirstDispatch:
    """Engines that share one dispatch a program for the first time one after the other: at once they would compile it
    once each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: set[Hashable] = set()

    @contextlib.contextmanager
    def __call__(self, program: Hashable) -> Iterator[None]:
        """While engines of the same shapes dispatch `program`."""
        if program in self._compiled:
            yield
            return
        with self._lock:
            yield
        self._compiled.add(program)


class LocalEngine:
    """See the module's docstring. Use one engine from one event loop only."""

    def __init__(
        self,
        arch: Architecture,
        config: EngineConfig,
        params: Params,
        *,
        version: int,
        head_size: int,
        stop_ids: tuple[int, ...],
        record_routes: bool = False,
        name: str = "local",
        first_dispatch: FirstDispatch | None = None,
    ):
        self.name = name
        self.admission = config.slots
        self.arch = arch
        self.config = sampler_config(config, head_size, record_routes)
        self.widths = widths(config.slots)
        self.stop_ids = stop_ids
        self.version = version
        self.stats = EngineStats()
        self._params = served(arch, params)
        self._stops = sampler.stop_array(stop_ids)
        self._first_dispatch = first_dispatch or FirstDispatch()
        self._prompts = PromptCache(arch, self.config.ends, config.prefill_rows)
        self._queue: deque[Pending] = deque()
        self._device = asyncio.Lock()  # held while weights or slots change
        self._runner: asyncio.Task[None] | None = None
        self._slots: sampler.Slots
        self._reset()

    def _reset(self) -> None:
        self._owner: list[Pending | None] = []  # there are no slots until somebody needs them

    async def generate(self, request: Request) -> list[Completion]:
        """See `rlx.rollout.engine.Engine`. A cancelled request frees its slots and says what it had written."""
        check_request(request, self.arch.vocab_size, self.config.context)
        loop = asyncio.get_running_loop()
        samples = [Pending(request, i, loop.create_future()) for i in range(len(request.seeds))]
        self._queue.extend(samples)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        try:
            return await asyncio.gather(*(s.future for s in samples))
        except asyncio.CancelledError as cancelled:
            async with self._device:  # the dispatch under way still writes
                self._release_cancelled()
            if not any(s.count for s in samples):
                raise
            said = f"request {request.id} was cancelled"
            raise EngineError(said, reason="cancelled", partial=self._partial(samples)) from cancelled
        except Exception as error:
            said = f"the engine failed: {error!r}"
            raise EngineError(said, reason="exception", partial=self._partial(samples)) from error

    async def load(self, weights: Params, version: int, /) -> None:
        """Serve `weights` as `version` from the next token on."""
        async with self._device:
            self._params = served(self.arch, weights)
            self.version = version
            self._prompts.clear()
            self._release_cancelled()
            running = [(slot, p) for slot, p in enumerate(self._owner) if p is not None]
            for _, sample in running:
                sample.restart()
            self._admit(running)

    # ---------------------------------------------------------------- the loop

    async def _run(self) -> None:
        """Admit, decode, collect, until nothing is left. A failure reaches every request that waits."""
        try:
            while self._queue or any(self._owner):
                async with self._device:
                    self._release_cancelled()
                    self._resize()
                    self._fill_free_slots()
                    if any(self._owner):
                        self._collect(await asyncio.to_thread(self._decode))
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _decode(self) -> sampler.Dispatch:
        """One dispatch, its results on the host. Where somebody waits it ends as soon as a slot is free."""
        longest = max(len(p.request.prompt) + p.count for p in self._owner if p is not None)
        stretches, until_free = reached(self.config.ends, longest), np.asarray(bool(self._queue))
        with self._first_dispatch((stretches, len(self._owner))):
            self._slots, dispatch = sampler.decode(
                self.arch, self.config, stretches, self._params, self._slots, until_free, self._stops
            )
        return jax.device_get(dispatch)

    def _release_cancelled(self) -> None:
        """Take back what nobody waits for any more."""
        self._queue = deque(p for p in self._queue if not p.future.cancelled())
        gone = {slot: p for slot, p in enumerate(self._owner) if p is not None and p.future.cancelled()}
        if gone:
            self._slots = sampler.release(self._slots, np.isin(np.arange(len(self._owner)), [*gone]))
        for slot, sample in gone.items():
            self.stats.aborted_tokens += sample.count
            self._owner[slot] = None

    def _resize(self) -> None:
        """As many slots as are needed: a step of fewer is faster."""
        busy = [slot for slot, p in enumerate(self._owner) if p is not None]
        needed = len(busy) + len(self._queue)
        width = width_for(self.widths, needed)
        if width == len(self._owner):
            return
        if not busy:
            self._owner = [None] * width
            self._slots = empty_slots(self.arch, self.config.ends, width, self._params["embed"].dtype)
        else:
            source = np.full(width, -1, np.int32)
            source[: len(busy)] = busy
            self._slots = sampler.resize(self._slots, source)
            self._owner = [self._owner[slot] if slot >= 0 else None for slot in source]

    def _fill_free_slots(self) -> None:
        """Move samples from the queue to free slots."""
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        self._admit([(slot, self._queue.popleft()) for slot in free[: len(self._queue)]])

    def _admit(self, admitted: Sequence[tuple[int, Pending]]) -> None:
        """Give slots to samples, with the keys and values of what each has so far."""
        for slot, sample in admitted:
            self._owner[slot] = sample  # before anything that may fail: who owns a slot learns of it
        waiting = list(itertools.islice(self._queue, _LOOK_AHEAD))
        prompts = [(p.key, p.tokens) for _, p in admitted]
        self.stats.prompt_tokens += self._prompts.prepare(self._params, prompts, [(p.key, p.tokens) for p in waiting])
        by_batch: dict[int, list[tuple[int, int, Pending]]] = {}
        for slot, sample in admitted:
            number, row = self._prompts[sample.key]
            by_batch.setdefault(number, []).append((slot, row, sample))
        for number, entries in by_batch.items():
            batch = self._prompts.batch(number)
            self._slots = sampler.admit(self.arch, self._slots, batch, self._admission(entries))
        self._prompts.forget({p.key for p in waiting})

    def _admission(self, entries: Sequence[tuple[int, int, Pending]]) -> sampler.Admission:
        given = no_admission(len(self._owner))
        for slot, row, sample in entries:
            request = sample.request
            given.prompt[slot], given.count[slot] = row, sample.count
            given.limit[slot] = min(request.max_new_tokens, self.config.context - len(request.prompt))
            given.seed[slot], given.temperature[slot] = sample.seed, request.temperature
        return jax.device_put(given)

    def _collect(self, dispatch: sampler.Dispatch) -> None:
        """Take what was written; give finished samples back."""
        self.stats.dispatches += 1
        self.stats.steps += int(dispatch.written.max())
        self.stats.slot_steps += int(dispatch.written.max()) * len(self._owner)
        drawn = dispatch.drawn
        for slot, sample in enumerate(self._owner):
            if sample is None:
                continue
            written = int(dispatch.written[slot])
            self.stats.new_tokens += written
            self.stats.busy_slot_steps += written
            fields = (drawn.tokens, drawn.logprobs, drawn.head_ids, drawn.head_logprobs)
            tokens, logprobs, ids, head = (np.array(x[:written, slot]) for x in fields)
            routes = None if dispatch.routes is None else np.array(dispatch.routes[:written, slot])
            sample.add(Written(tokens, logprobs, ids, head, routes), self.version)
            if not dispatch.active[slot]:
                self._owner[slot] = None
                reason = StopReason.STOP if dispatch.stopped[slot] else StopReason.LENGTH
                if sample.future.done():
                    self.stats.aborted_tokens += sample.count
                else:
                    sample.future.set_result(self._completion(sample, reason))

    def _partial(self, samples: Sequence[Pending]) -> tuple[Completion | None, ...]:
        return tuple(self._completion(s, StopReason.ABORT) if s.count else None for s in samples)

    def _completion(self, sample: Pending, reason: StopReason) -> Completion:
        return sample.completion(reason, with_head=self.config.head_size > 0)

    def _fail(self, error: BaseException) -> None:
        waiting = [p for p in self._owner if p is not None] + list(self._queue)
        self._queue.clear()
        self._prompts.clear()
        for sample in waiting:
            self.stats.aborted_tokens += sample.count
            if not sample.future.done():
                sample.future.set_exception(EngineError(repr(error)))
        # The failed dispatch was given the slots' memory; later requests need slots of their own.
        self._reset()


def served(arch: Architecture, params: Params) -> Params:
    """Parameters as engines hold them: a tree a layer. Those of another engine stay as they are, and are shared; so is
    what is no layer, embedding and head, with `params`, which must not be donated while an engine serves them."""
    return params if isinstance(params["layers"], tuple) else sampler.unstack_layers(arch, params)


def sampler_config(config: EngineConfig, head_size: int, record_routes: bool) -> SamplerConfig:
    ends = tuple(sorted({b for b in config.prefill_buckets if b < config.context} | {config.context}))
    return SamplerConfig(ends, head_size, config.steps_per_dispatch, record_routes)


def no_admission(slots: int) -> Any:
    """A `sampler.Admission` of numpy arrays, to be filled in, in which every slot goes on with what it has."""
    fields: dict[str, Any] = {
        "prompt": np.full(slots, -1, np.int32),
        "count": np.zeros(slots, np.int32),
        "limit": np.zeros(slots, np.int32),
        "seed": np.zeros(slots, np.uint32),
        "temperature": np.ones(slots, np.float32),
    }
    return sampler.Admission(**fields)


def reached(ends: tuple[int, ...], longest: int) -> int:
    """Stretches of the cache that a dispatch reads where `longest` tokens are the most that a slot has.

    One that the longest is about to leave would be compiled for a single token.
    """
    return next((i for i, end in enumerate(ends, 1) if end > longest), len(ends))


def widths(slots: int) -> tuple[int, ...]:
    """Numbers of slots that decoding is compiled for, ascending: all, and quarters of it."""
    found = [slots]
    while found[0] % 4 == 0 and found[0] // 4 >= _NARROWEST:
        found.insert(0, found[0] // 4)
    return tuple(found)


def width_for(widths: Sequence[int], samples: int) -> int:
    """The fewest slots that `samples` samples fit into at once, or all."""
    return next((width for width in widths if width >= samples), widths[-1])
