"""What the objective adds to an update: plain REINFORCE, and what each further part costs on the same samples.

    python -m bench.objective_cost [--repeats 7] [--implementation xla]

A Qwen3 of 4 layers, width 256, 4 heads and 2 KV heads of 64, FFN 768, vocabulary 32,768, float32, random weights, every
parameter or a LoRA adapter trained with Adam; 32 sequences of 64 tokens, all but the first of each a target. Medians
of interleaved runs in one process, the first of each left out; memory is the temporary memory of the compiled update.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from configs import base
from rlx.assemble import device_batch
from rlx.config.parse import parse
from rlx.config.schema import Config
from rlx.data.packing import PackingConfig, Trajectory, pack
from rlx.learner.state import init_state, make_optimizer
from rlx.learner.step import Batch, StepConfig, add_slice, update, zero_total
from rlx.models.lora import adapter_scale
from rlx.models.presets import dense
from rlx.models.spec import init_params
from rlx.types import TopK

ARCH = dense(
    "qwen3",
    vocab_size=32768,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tied=True,
    max_positions=2048,
)
SEQUENCES, TOKENS, ROW, HEAD = 32, 64, 256, 128
PLAIN = {"loss": "reinforce", "centering": "off", "entropy_coefficient": 0.0}
PARTS = {
    "plain REINFORCE": PLAIN,
    "TIS": PLAIN | {"loss": "tis"},
    "TIS, entropy bonus": PLAIN | {"loss": "tis", "entropy_coefficient": 0.01},
    f"TIS, centering with K = {HEAD}": PLAIN | {"loss": "tis", "centering": "tis"},
    "all of it": PLAIN | {"loss": "tis", "centering": "tis", "entropy_coefficient": 0.01},
}
TIME_GOAL, MEMORY_GOAL = 1.25, 1.1


class Case(NamedTuple):
    run: Callable[[], None]
    temporary: int  # bytes


def batch_of(head_size: int) -> Batch:
    """The same samples with or without the sampler's heads, which plain REINFORCE does not store."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(SEQUENCES):
        ids = rng.integers(0, ARCH.vocab_size, TOKENS).astype(np.int32)
        candidates = np.stack([rng.choice(ARCH.vocab_size, HEAD, replace=False) for _ in ids[1:]]).astype(np.int32)
        head = TopK(candidates, np.full(candidates.shape, -5.0, np.float32)) if head_size else None
        advantage, logprobs = float(rng.normal()), rng.normal(-10.4, 0.3, TOKENS).astype(np.float32)
        samples.append(Trajectory(ids, np.arange(TOKENS) > 0, advantage, logprobs, np.zeros(TOKENS, np.int32), head))
    return device_batch(pack(samples, PackingConfig(ROW, ROW, SEQUENCES * TOKENS // ROW, 1, head_size)))


def case_of(config: Config, changes: dict, implementation: str | None) -> Case:
    objective = dataclasses.replace(config.objective, **changes)
    scale = adapter_scale(config.lora) if config.lora.rank else None
    step = StepConfig(ARCH, objective, scale, 1.0, "none", "float32", implementation, SEQUENCES)
    optimizer, params = make_optimizer(config.learner), init_params(ARCH, jax.random.key(0))
    batch = batch_of(HEAD if objective.needs_head else 0)
    held = [init_state(ARCH, config.lora, params, optimizer, jax.random.key(1))]
    zeros = zero_total(step, held[0].trainable, params, batch[0])
    compiled = add_slice.lower(step, held[0].trainable, params, batch[0], zeros).compile()

    def run() -> None:
        held[0], scalars, metrics = update(step, optimizer, held[0], params, batch)
        jax.block_until_ready((scalars, metrics))

    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError(f"the {jax.default_backend()} backend does not say how much memory a program needs")
    return Case(run, memory.temp_size_in_bytes)


def measure(cases: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, the cases taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case.run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(title: str, cases: dict[str, Case], seconds: dict[str, list[float]]) -> None:
    """A table; ratios of time are medians of the ratios within a turn, which a busy machine disturbs less."""
    first, plain = next(iter(cases)), next(iter(cases.values()))
    print(f"\n| {title} | ms | time, of the first row | temporary MiB | memory, of the first row |")
    print("|:--|--:|--:|--:|--:|")
    for name, case in cases.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[first]))
        middle, memory = statistics.median(seconds[name]), case.temporary / plain.temporary
        print(f"| {name} | {1e3 * middle:.0f} | {ratio:.3f} | {case.temporary / 2**20:.1f} | {memory:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--implementation", default=None, help="of the log-prob head; default: chosen as in a run")
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {SEQUENCES * TOKENS} tokens, head of {HEAD}")
    for title, rank in (("every parameter trained", 0), ("LoRA of rank 16 trained", 16)):
        tree = base.get_config()
        tree.lora.rank = rank
        config = parse(tree)
        cases = {name: case_of(config, changes, arguments.implementation) for name, changes in PARTS.items()}
        report(title, cases, measure(cases, arguments.repeats))
    print(f"\ngoals for all of it: time at most {TIME_GOAL} x, memory at most {MEMORY_GOAL} x")


if __name__ == "__main__":
    main()
