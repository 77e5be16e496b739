"""How fast the embedded engine decodes and prefills, against what the machine's matrix products would allow.

    python -m bench.decode                      # random weights in the shape of SmolLM2-135M
    python -m bench.decode --model models/smollm2-135m-instruct --dtype bfloat16 --slots 64 16

The matrix rate is that of one square float32 product, measured between the others: medians of interleaved runs, so that
a share of it means the same on a machine that is busy. Floating-point operations are counted as 2 a parameter and
token, without attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.budget import SMOLLM2
from rlx.models import hf, sampler
from rlx.models.spec import Architecture, Params, count_parameters, init_params
from rlx.parallel.runtime import peak_host_memory_gib

SQUARE = 2048
HEAD = 128


class Case(NamedTuple):
    run: Callable[[], None]
    tokens: int
    operations: float


def matrix_case() -> Case:
    square = jax.random.normal(jax.random.key(0), (SQUARE, SQUARE))
    product = jax.jit(jnp.matmul)
    return Case(lambda: jax.block_until_ready(product(square, square)), SQUARE, 2.0 * SQUARE**3)


def prefill_case(arch: Architecture, params: Params, rows: int, bucket: int) -> Case:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, arch.vocab_size, (rows, bucket)), jnp.int32)
    lengths = jnp.full(rows, bucket, jnp.int32)

    def run() -> None:
        jax.block_until_ready(sampler.prefill(arch, params, tokens, lengths))

    return Case(run, rows * bucket, 2.0 * _block_parameters(arch) * rows * bucket)


def decode_case(arch: Architecture, params: Params, slots: int, head: int, ends: tuple[int, int]) -> Case:
    """From half of the first stretch on, `steps` tokens in every slot."""
    config = sampler.SamplerConfig(ends, head, steps=8)
    prompt = sampler.prefill(arch, params, jnp.ones((1, ends[0]), jnp.int32), jnp.full(1, ends[0] // 2, jnp.int32))
    zeros = jnp.zeros(slots, jnp.int32)
    admission = sampler.Admission(
        zeros, zeros, zeros + 10**6, jnp.arange(slots, dtype=jnp.uint32), jnp.ones(slots, jnp.float32)
    )
    stops = jnp.asarray(sampler.stop_array(()))
    held = [sampler.init_slots(arch, config.ends, slots, params["embed"].dtype)]

    def run() -> None:
        held[0] = sampler.admit(arch, held[0], prompt, admission)
        held[0], dispatch = sampler.decode(arch, config, 1, params, held[0], jnp.asarray(False), stops)
        assert (np.asarray(dispatch.written) == config.steps).all()

    tokens = slots * config.steps
    return Case(run, tokens, 2.0 * (_block_parameters(arch) + arch.vocab_size * arch.hidden_size) * tokens)


def _block_parameters(arch: Architecture) -> int:
    """Without embedding and output head."""
    return count_parameters(arch) - (1 if arch.tied else 2) * arch.vocab_size * arch.hidden_size


def measure(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Median seconds of each case, run in turn; the first round compiles and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case.run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face directory; random weights where it is not given")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--rows", type=int, default=8, help="prompts prefilled at once")
    parser.add_argument("--bucket", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    arch = hf.read_architecture(arguments.model) if arguments.model else SMOLLM2
    stacked = (
        jax.tree.map(jnp.asarray, hf.load_params(arguments.model, arch, arguments.dtype))
        if arguments.model
        else init_params(arch, jax.random.key(0), jnp.dtype(arguments.dtype))
    )
    params = sampler.unstack_layers(arch, stacked)
    ends = (arguments.bucket, 2 * arguments.bucket)
    cases = {
        f"product of {SQUARE} x {SQUARE}, float32": matrix_case(),
        f"prefill of {arguments.rows} x {arguments.bucket}": prefill_case(
            arch, params, arguments.rows, arguments.bucket
        ),
    } | {
        f"decode, batch {slots}, head of {head}": decode_case(arch, params, slots, head, ends)
        for slots in arguments.slots
        for head in (HEAD, 0)
    }
    medians = measure(cases, arguments.repeats)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {arguments.dtype}, {arguments.repeats} rounds")
    print("| what | ms | tokens/s | GFLOP/s | of the matrix rate |\n|:--|--:|--:|--:|--:|")
    rate = next(case.operations / medians[name] for name, case in cases.items())
    for name, case in cases.items():
        seconds = medians[name]
        own = case.operations / seconds
        speed = f"{case.tokens / seconds:,.0f}" if own != rate else ""
        print(f"| {name} | {1e3 * seconds:.1f} | {speed} | {own / 1e9:.0f} | {own / rate:.2f} |")
    print(f"peak memory {peak_host_memory_gib():.1f} GiB")


if __name__ == "__main__":
    main()
