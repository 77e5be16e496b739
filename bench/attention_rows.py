"""Both passes of attention over one packed row, scores held whole beside blocks of them: time and memory by length.

    make bench                         # or: python -m bench.attention_rows [--lengths 512 2048] [--blocks 256 512]

A row of four sequences of equal length, then one that is a single sequence, 8 heads over 2 of keys, 64 wide, float32.
The sides take turns in one process; CPU seconds are medians, the ratio is the median of the ratios within a turn.
Temporaries are XLA's own account of the compiled program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models.blockwise import Blocks, blockwise_attention
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def packed_row(tokens: int, sequences: int) -> Ids:
    each = tokens // sequences
    positions, segments = np.arange(tokens) % each, np.arange(tokens) // each + 1
    return Ids(*(jnp.asarray(x, jnp.int32)[None] for x in (positions, segments, np.zeros(tokens))))


def compiled(block: int, tokens: int, arrays: list[jax.Array], ids: Ids) -> jax.stages.Compiled:
    """Value and gradients. block: 0 = whole."""

    def total(query: jax.Array, key: jax.Array, value: jax.Array, ids: Ids) -> jax.Array:
        if block:
            return (blockwise_attention(Blocks(block, None), query, key, value, ids) ** 2).sum()
        return (packed_attention(query, key, value, visible(ids, ids, None)) ** 2).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(*arrays, ids).compile()


def cpu_seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - begin


def measured(tokens: int, sequences: int, blocks: list[int], repeats: int) -> None:
    random, ids = np.random.default_rng(0), packed_row(tokens, sequences)
    arrays = [jnp.asarray(random.normal(size=(1, tokens, n, WIDTH)), jnp.float32) for n in (HEADS, KV_HEADS, KV_HEADS)]
    programs = {block: compiled(block, tokens, arrays, ids) for block in (0, *(b for b in blocks if b < tokens))}
    for program in programs.values():
        jax.block_until_ready(program(*arrays, ids))
    turns = [{b: cpu_seconds(lambda p=p: p(*arrays, ids)) for b, p in programs.items()} for _ in range(repeats)]
    for block, program in programs.items():
        said = program.memory_analysis()
        assert said is not None
        name = f"blocks of {block}" if block else "whole"
        seconds = statistics.median(turn[block] for turn in turns)
        ratio = statistics.median(turn[block] / turn[0] for turn in turns)
        memory = said.temp_size_in_bytes / 2**20
        print(f"{tokens:6} {sequences:10} {name:>14} {seconds:9.4f} {ratio:7.2f} {memory:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{'tokens':>6} {'sequences':>10} {'scores':>14} {'CPU s':>9} {'ratio':>7} {'MiB':>9}")
    for tokens in given.lengths:
        for sequences in (4, 1):
            measured(tokens, sequences, given.blocks, given.repeats)


if __name__ == "__main__":
    main()
