"""An update with each group's prompt computed once, beside the same update with every sample whole.

    make bench                         # or: python -m bench.prefix_sharing [--repeats 5] [--groups 8] [--samples 8]

By default 8 groups of 8 samples, 48 tokens of prompt and 16 of response each. Prompts are shared in rows whose parts
lie side by side and, where prompts are no longer than responses, in rows of one shape (`learner.row_samples`). All
sides get rows that fit what they lay out, without padding but for the shape's, and the same number of tokens in a
micro-batch as nearly as that goes. They take turns in one process; times are medians, the ratios are medians of those
within a turn. First it is checked that all have the same loss and gradient norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np

from bench.budget import HEAD, SMOLLM2
from configs import base
from rlx.assemble import device_batch
from rlx.config.parse import parse
from rlx.config.schema import Config
from rlx.data.packing import PackedBatch, PackingConfig, Trajectory, pack
from rlx.learner.state import LearnerState, init_state, make_optimizer
from rlx.learner.step import StepConfig, accumulate, apply
from rlx.models.lora import adapter_scale
from rlx.models.presets import dense
from rlx.models.spec import Architecture, init_params
from rlx.types import RowShape, TopK

SMALL = dense(
    "qwen3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    tied=True,
    max_positions=2048,
)
MICRO_BATCH = 1024  # tokens, about


class Work(NamedTuple):
    groups: int
    samples: int
    prompt: int
    response: int


class Side:
    """One way to lay the samples out, and a learner of its own that trains on them."""

    def __init__(self, arch: Architecture, config: Config, trajectories: list[Trajectory], packing: PackingConfig):
        self.packed: PackedBatch = pack(trajectories, packing)
        scale = adapter_scale(config.lora) if config.lora.rank else None
        count = len(trajectories)
        self._step = StepConfig(arch, config.objective, scale, 1.0, "products", "float32", None, count)
        self._optimizer = make_optimizer(config.learner)
        self._params = init_params(arch, jax.random.key(0))
        self._batch = device_batch(self.packed)
        self._state: LearnerState = init_state(arch, config.lora, self._params, self._optimizer, jax.random.key(1))

    def update(self) -> tuple[float, dict[str, float]]:
        """(seconds, scalars)"""
        start = time.perf_counter()
        total = accumulate(self._step, self._state.trainable, self._params, self._batch)
        self._state, scalars, _ = apply(self._optimizer, self._state, total)
        scalars = {name: float(x) for name, x in scalars.items()}
        return time.perf_counter() - start, scalars


def samples_of(work: Work, vocab: int, head: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    found = []
    for group in range(work.groups):
        prompt = rng.integers(0, vocab, work.prompt)
        for _ in range(work.samples):
            ids = np.concatenate([prompt, rng.integers(0, vocab, work.response)]).astype(np.int32)
            mask = np.arange(len(ids)) >= work.prompt
            candidates = np.argsort(rng.random((work.response, 4 * HEAD)), axis=1)[:, :head].astype(np.int32)
            found.append(
                Trajectory(
                    tokens=ids,
                    mask=mask,
                    advantage=float(rng.normal()),
                    logprobs=np.full(len(ids), -5.0, np.float32),
                    ages=np.zeros(len(ids), np.int32),
                    head=TopK(candidates, np.full(candidates.shape, -6.0, np.float32)) if head else None,
                    group=group,
                )
            )
    return found


def packing_of(row: int, targets: int, rows: int, head: int, share: bool) -> PackingConfig:
    """Micro-batches of about MICRO_BATCH tokens that `rows` rows fill to the last one."""
    most = max(MICRO_BATCH // row, 1)
    each = max(n for n in range(1, most + 1) if rows % n == 0)
    return PackingConfig(row, targets, each, 10**6, head, share)


def compare(name: str, arch: Architecture, work: Work, *, lora: bool, repeats: int) -> None:
    tree = base.get_config()
    tree.tasks.sources.sums = base.source(dataset="chain_sum")
    if not lora:
        tree.lora.rank, tree.objective.centering = 0, "off"
    config, head = parse(tree), HEAD if lora else 0
    trajectories = samples_of(work, arch.vocab_size, head)
    own = work.response - 1  # the last token of a response predicts nothing
    count = work.groups * work.samples
    whole = packing_of(work.prompt + own, work.response, count, head, share=False)
    targets = work.samples * work.response
    shared = packing_of(work.prompt + work.samples * own, targets, work.groups, head, share=True)
    ways = {"every sample whole": whole, "prompts shared": shared}
    if work.prompt <= work.response:
        shaped = packing_of(work.prompt + work.samples * work.response, targets, work.groups, head, share=True)
        ways["the same, rows of one shape"] = dataclasses.replace(shaped, row_shape=RowShape(work.prompt, work.samples))
    sides = [Side(arch, config, trajectories, packing) for packing in ways.values()]
    first = [side.update()[1] for side in sides]
    for scalar in ("loss", "grad_norm"):
        for other in first[1:]:
            np.testing.assert_allclose(other[scalar], first[0][scalar], rtol=1e-3, atol=1e-5)
    seconds = [[side.update()[0] for side in sides] for _ in range(repeats)]
    print(f"\n| {name} | tokens computed | with padding | s an update | fewer tokens | less time |")
    print("|:--|--:|--:|--:|--:|--:|")
    for i, label in enumerate(ways):
        packed, took = sides[i].packed, statistics.median(turn[i] for turn in seconds)
        fewer = sides[0].packed.num_tokens / packed.num_tokens
        less = statistics.median(turn[0] / turn[i] for turn in seconds)
        print(
            f"| {label} | {packed.num_tokens} | {packed.segment_ids.size} | {took:.3f} | {fewer:.2f} x | {less:.2f} x |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--response", type=int, default=16)
    given = parser.parse_args()
    work = Work(given.groups, given.samples, given.prompt, given.response)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, float32, {given.repeats} interleaved runs, {work}")
    compare("4 layers of width 256, all trained", SMALL, work, lora=False, repeats=given.repeats)
    compare("SmolLM2-135M's shape, LoRA on attention", SMOLLM2, work, lora=True, repeats=given.repeats)


if __name__ == "__main__":
    main()
