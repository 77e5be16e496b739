"""What one update of the quickstart costs by LoRA targets, share of targets and what is recomputed.

    make bench                         # or: python -m bench.budget [--rows 64] [--tokens 64] [--repeats 5]

Random weights in the shape of SmolLM2-135M; medians of interleaved runs, the first of each left out (compilation).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from configs import base
from rlx.assemble import device_batch
from rlx.config.parse import parse
from rlx.config.schema import LINEAR_LAYERS, Config
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.learner.state import init_state, make_optimizer
from rlx.learner.step import StepConfig, update
from rlx.models.lora import adapter_scale
from rlx.models.presets import dense
from rlx.models.spec import Params, init_params
from rlx.models.transformer import Remat
from rlx.parallel.runtime import peak_host_memory_gib
from rlx.types import TopK

SMOLLM2 = dense(
    "qwen2",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    tied=True,
    max_positions=2048,
)
HEAD = 128


def batch_of(rows: int, tokens: int, micro_batch_tokens: int, targets: float) -> tuple[PackingConfig, list[Trajectory]]:
    """`rows` random sequences of `tokens`, the last share `targets` of which is trained."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(rows):
        ids = rng.integers(0, SMOLLM2.vocab_size, tokens).astype(np.int32)
        mask = np.arange(tokens) >= max(tokens * (1 - targets), 1)  # nothing predicts the first token
        head = np.argsort(rng.random((int(mask.sum()), 4 * HEAD)), axis=1)[:, :HEAD].astype(np.int32)
        zeros = np.full(tokens, -2.0, np.float32)
        sequences.append(Trajectory(ids, mask, 1.0, zeros, np.zeros(tokens, np.int32), TopK(head, head * 0.0 - 5)))
    packing = PackingConfig(
        256, int(256 * targets), micro_batch_tokens // 256, rows * tokens // micro_batch_tokens, HEAD
    )
    return packing, sequences


def update_case(
    config: Config, params: Params, targets: tuple[str, ...], remat: Remat, shape: tuple
) -> Callable[[], None]:
    lora = dataclasses.replace(config.lora, targets=targets)
    optimizer = make_optimizer(config.learner)
    packing, sequences = shape
    step = StepConfig(
        SMOLLM2, config.objective, adapter_scale(lora), 1.0, remat, "float32", None, num_sequences=len(sequences)
    )
    batch = device_batch(pack(sequences, packing))
    held = [init_state(SMOLLM2, lora, params, optimizer, jax.random.key(1))]

    def run() -> None:
        held[0], scalars, _ = update(step, optimizer, held[0], params, batch)
        jax.block_until_ready(scalars)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    tree = base.get_config()
    tree.tasks.sources.sums = base.source(dataset="chain_sum")
    config = parse(tree)
    params = init_params(SMOLLM2, jax.random.key(0))
    half = batch_of(arguments.rows, arguments.tokens, 1024, 0.5)
    whole = batch_of(arguments.rows, arguments.tokens, 1024, 1.0)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    total = arguments.rows * arguments.tokens
    cases = {
        "update, LoRA on all linear layers, every token a target, remat = layer": (
            update_case(config, params, LINEAR_LAYERS[:7], "layer", whole),
            total,
        ),
        "update, LoRA on attention, every token a target, remat = layer": (
            update_case(config, params, attention, "layer", whole),
            total,
        ),
        "update, LoRA on attention, half the tokens targets, remat = layer": (
            update_case(config, params, attention, "layer", half),
            total,
        ),
        "update, LoRA on attention, half the tokens targets, remat = products": (
            update_case(config, params, attention, "products", half),
            total,
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(arguments.repeats + 1):
        for name, (run, _) in cases.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, float32, {arguments.repeats} interleaved runs")
    print("| what | s | ms a token | of the first row |\n|:--|--:|--:|--:|")
    first = statistics.median(next(iter(seconds.values())))
    for name, (_, tokens) in cases.items():
        median = statistics.median(seconds[name])
        print(f"| {name} | {median:.2f} | {1e3 * median / tokens:.2f} | {median / first:.2f} |")
    print(f"peak memory {peak_host_memory_gib():.1f} GiB")


if __name__ == "__main__":
    main()
