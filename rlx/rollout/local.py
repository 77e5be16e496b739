"""The embedded engine: continuous batching on the model's own sampler, in the trainer's process.

The host side keeps a queue of samples and the state of each slot; the device side is `rlx.models.sampler`. Samples are
admitted in the order they were asked for, into the lowest free slots, so a run that asks in a fixed order is
reproducible to the bit. Weights are swapped between two dispatches, never during one; running responses go on with the
new weights, their cache computed anew, and the version of every token is recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from rlx.config.schema import EngineConfig
from rlx.models import sampler
from rlx.models.sampler import SamplerConfig
from rlx.models.spec import Architecture, Params
from rlx.rollout.engine import Completion, EngineError, Request, check_request
from rlx.types import StopReason, TopK, VersionSpan


@dataclasses.dataclass(eq=False)
class _Pending:
    """One sample of a request, from the queue to its completion."""

    request: Request
    index: int
    future: asyncio.Future[Completion]
    spans: list[VersionSpan] = dataclasses.field(default_factory=list)
    count: int = 0  # tokens written
    tokens: np.ndarray | None = None  # what was written before the cache was last computed


@dataclasses.dataclass
class EngineStats:
    """Totals since the engine was made."""

    prompt_tokens: int = 0  # prefilled, once for the samples of a prompt that are admitted together
    new_tokens: int = 0
    dispatches: int = 0
    slot_steps: int = 0  # dispatches x slots
    busy_slot_steps: int = 0  # of these, by slots with a request

    @property
    def occupancy(self) -> float:
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0


class LocalEngine:
    """See the module's docstring. Use one engine from one event loop only."""

    def __init__(
        self,
        arch: Architecture,
        config: EngineConfig,
        params: Params,
        *,
        version: int,
        max_new_tokens: int,
        head_size: int,
        stop_ids: tuple[int, ...],
    ):
        self.arch = arch
        self.config = SamplerConfig(
            slots=config.slots,
            context=config.context,
            max_new_tokens=max_new_tokens,
            head_size=head_size,
            steps=config.steps_per_dispatch,
            stop_ids=stop_ids,
        )
        self.buckets = tuple(sorted({*config.prefill_buckets, config.context}))
        self.prefill_rows = config.prefill_rows
        self.version = version
        self.stats = EngineStats()
        self._params = sampler.unstack_layers(params)
        self._slots = sampler.init_slots(arch, self.config, params["embed"].dtype)
        self._owner: list[_Pending | None] = [None] * config.slots
        self._queue: deque[_Pending] = deque()
        self._device = asyncio.Lock()  # held while weights or slots change
        self._runner: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> list[Completion]:
        check_request(request, self.arch.vocab_size, self.config.context)
        if request.max_new_tokens > self.config.max_new_tokens:
            raise EngineError(
                f"request {request.id}: max_new_tokens {request.max_new_tokens} is above the engine's "
                f"{self.config.max_new_tokens}, the size of its buffers"
            )
        loop = asyncio.get_running_loop()
        samples = [_Pending(request, i, loop.create_future()) for i in range(len(request.seeds))]
        self._queue.extend(samples)
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        try:
            return await asyncio.gather(*(s.future for s in samples))
        except asyncio.CancelledError:
            self._forget(samples)
            raise

    async def load(self, params: Params, version: int) -> None:
        """Serve `params` as `version` from the next token on."""
        async with self._device:
            running = [(slot, p) for slot, p in enumerate(self._owner) if p is not None]
            written = np.asarray(self._slots.tokens)
            for slot, sample in running:
                self._close_span(sample)
                sample.tokens = written[slot, : sample.count].copy()
            self._params = sampler.unstack_layers(params)
            self.version = version
            for start in range(0, len(running), self.prefill_rows):
                self._admit(running[start : start + self.prefill_rows])

    # ---------------------------------------------------------------- the loop

    async def _run(self) -> None:
        """Admit, decode, collect, until nothing is left. A failure reaches every request that waits."""
        try:
            while self._queue or any(self._owner):
                async with self._device:
                    self._fill_free_slots()
                    await asyncio.to_thread(self._decode)
                    self._collect()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _decode(self) -> None:
        self._slots = sampler.decode(self.arch, self.config, self._params, self._slots)
        self._slots.active.block_until_ready()

    def _fill_free_slots(self) -> None:
        """Move samples from the queue to free slots. Samples of one prompt that are admitted together share its
        prefill."""
        free = deque(slot for slot, owner in enumerate(self._owner) if owner is None)
        while free and self._queue:
            batch: list[tuple[int, _Pending]] = []
            while free and self._queue:
                requests = {id(p.request) for _, p in batch} | {id(self._queue[0].request)}
                if len(requests) > self.prefill_rows:
                    break
                batch.append((free.popleft(), self._queue.popleft()))
            self._admit(batch)

    def _admit(self, batch: list[tuple[int, _Pending]]) -> None:
        """Prefill the batch's sequences and give their keys and values to the slots."""
        rows: list[np.ndarray] = []
        row_of: dict[int, int] = {}  # a fresh request's row, shared by its samples
        admitted = []
        for slot, sample in batch:
            shared = row_of.get(id(sample.request)) if sample.tokens is None else None
            if shared is None:
                shared = len(rows)
                written = np.zeros(0, np.int32) if sample.tokens is None else sample.tokens
                rows.append(np.concatenate([sample.request.prompt, written]).astype(np.int32))
                if sample.tokens is None:
                    row_of[id(sample.request)] = shared
            admitted.append((slot, shared, sample))
            self._owner[slot] = sample
        longest = max(len(r) for r in rows)
        bucket = next(b for b in self.buckets if b >= longest)
        tokens = np.zeros((self.prefill_rows, bucket), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        lengths = np.array([len(r) for r in rows] + [1] * (self.prefill_rows - len(rows)), np.int32)
        keys, values = sampler.prefill(self.arch, self._params, jnp.asarray(tokens))
        admission = self._admission(admitted)
        self._slots = sampler.admit(self._slots, keys, values, jnp.asarray(tokens), jnp.asarray(lengths), admission)
        self.stats.prompt_tokens += int(sum(len(r) for r in rows))

    def _admission(self, admitted: list[tuple[int, int, _Pending]]) -> sampler.Admission:
        size = self.config.slots
        slot = np.full(size, size, np.int32)  # out of range: dropped
        prompt, count, limit = (np.zeros(size, np.int32) for _ in range(3))
        seed, temperature = np.zeros(size, np.uint32), np.ones(size, np.float32)
        for i, (at, row, sample) in enumerate(admitted):
            request = sample.request
            slot[i], prompt[i], count[i] = at, row, sample.count
            limit[i] = min(request.max_new_tokens, self.config.context - len(request.prompt))
            seed[i], temperature[i] = request.seeds[sample.index], request.temperature
        return sampler.Admission(*(jnp.asarray(x) for x in (slot, prompt, count, limit, seed, temperature)))

    def _collect(self) -> None:
        """Give finished samples back; take note of how far the others are."""
        active, count, stopped = jax.device_get((self._slots.active, self._slots.count, self._slots.stopped))
        finished = []
        self.stats.dispatches += 1
        self.stats.slot_steps += self.config.slots
        for slot, sample in enumerate(self._owner):
            if sample is None:
                continue
            self.stats.busy_slot_steps += 1
            self.stats.new_tokens += int(count[slot]) - sample.count
            sample.count = int(count[slot])
            if not active[slot]:
                finished.append((slot, sample))
        if not finished:
            return
        arrays = jax.device_get(
            (self._slots.tokens, self._slots.logprobs, self._slots.head_ids, self._slots.head_logprobs)
        )
        for slot, sample in finished:
            self._owner[slot] = None
            self._close_span(sample)
            tokens, logprobs, head_ids, head_logprobs = (a[slot, : sample.count].copy() for a in arrays)
            completion = Completion(
                tokens=tokens,
                logprobs=logprobs,
                head=TopK(head_ids, head_logprobs) if self.config.head_size else None,
                version_spans=tuple(sample.spans),
                stop_reason=StopReason.STOP if stopped[slot] else StopReason.LENGTH,
            )
            if not sample.future.done():
                sample.future.set_result(completion)

    def _close_span(self, sample: _Pending) -> None:
        """Book the tokens written since the last span under the version that is serving."""
        start = sample.spans[-1].end if sample.spans else 0
        if sample.count > start:
            sample.spans.append(VersionSpan(self.version, start, sample.count))

    def _forget(self, samples: list[_Pending]) -> None:
        """Take cancelled samples out of the queue. Those in slots run to their end and are dropped there."""
        cancelled = set(map(id, samples))
        self._queue = deque(p for p in self._queue if id(p) not in cancelled)

    def _fail(self, error: BaseException) -> None:
        waiting = [p for p in self._owner if p is not None] + list(self._queue)
        self._owner = [None] * self.config.slots
        self._queue.clear()
        for sample in waiting:
            if not sample.future.done():
                sample.future.set_exception(EngineError(f"the engine failed: {error!r}"))
        # The failed dispatch was given the slots' memory; later requests need slots of their own.
        self._slots = sampler.init_slots(self.arch, self.config, self._params["embed"].dtype)
