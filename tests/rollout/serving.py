"""Small engines, requests to them, and what the trainer says of their completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from rlx.assemble import device_batch
from rlx.config.schema import EngineConfig
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.learner.step import MicroBatch, StepConfig, slice_loss
from rlx.models.spec import Architecture, Params
from rlx.rollout.engine import Completion, Request
from rlx.rollout.local import LocalEngine
from tests.oracle_adapter import base_objective

CONFIG = EngineConfig(
    kind="local", slots=3, context=32, prefill_buckets=(8, 16), prefill_rows=2, steps_per_dispatch=3, lanes=1
)


def make_engine(
    arch: Architecture,
    params: Params,
    config: EngineConfig = CONFIG,
    *,
    head_size: int = 4,
    stop_ids: tuple[int, ...] = (),
) -> LocalEngine:
    return LocalEngine(arch, config, params, version=0, head_size=head_size, stop_ids=stop_ids)


def ask(
    number: int, length: int, samples: int = 1, *, vocab: int = 260, new: int = 10, temperature: float = 1.0
) -> Request:
    """Request `number` with a random prompt of `length` tokens."""
    prompt = np.random.default_rng(number).integers(0, vocab, length).astype(np.int32)
    seeds = tuple(100 * number + i for i in range(samples))
    return Request(f"r{number}", prompt, seeds, max_new_tokens=new, temperature=temperature)


def serve(engine: LocalEngine, requests: Sequence[Request]) -> list[list[Completion]]:
    """All requests at once."""

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(together())


def assert_same(got: Completion, wanted: Completion, tolerance: float = 2e-5) -> None:
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=tolerance)
    if got.head is not None and wanted.head is not None:
        np.testing.assert_allclose(got.head.logprobs, wanted.head.logprobs, atol=tolerance)
    assert (got.head is None) == (wanted.head is None)
    assert (got.stop_reason, got.version_spans) == (wanted.stop_reason, wanted.version_spans)


# --------------------------------------------------------------------------------------------------------- the trainer


@partial(jax.jit, static_argnums=0)
def _largest_gap(config: StepConfig, params: Params, batch: MicroBatch) -> jax.Array:
    return slice_loss(config, params, params, batch)[1].maxima["offpolicy/logprob_gap_max"]


def trainer_gap(
    arch: Architecture,
    params: Params,
    written: Sequence[tuple[Request, Completion]],
    masks: Sequence[np.ndarray] | None = None,
    temperature: float = 1.0,
) -> float:
    """Largest |log q - log p| of the learner over the written tokens, or over those of the masks [W]."""
    trajectories = []
    for i, (request, completion) in enumerate(written):
        start, count = len(request.prompt), len(completion.tokens)
        chosen = np.ones(count, bool) if masks is None else masks[i]
        blank = np.zeros(start)
        trajectories.append(
            Trajectory(
                tokens=np.concatenate([request.prompt, completion.tokens]),
                mask=np.concatenate([blank, chosen]).astype(bool),
                advantage=1.0,
                logprobs=np.concatenate([blank, completion.logprobs]).astype(np.float32),
                ages=np.zeros(start + count, np.int32),
                head=None,
            )
        )
    packed = pack(trajectories, PackingConfig(row_tokens=64, row_targets=48, rows=2, capacity=4, head_size=0))
    config = StepConfig(arch, base_objective(loss="reinforce"), None, temperature, "none", "float32", None, 12)
    return max(float(_largest_gap(config, params, micro_batch)) for micro_batch in device_batch(packed))
