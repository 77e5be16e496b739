"""Both passes of attention over packed rows, scores held whole beside blocks of them: time and memory by length.

    make bench                  # or: python -m bench.attention_rows [--lengths 512 2048] [--blocks 256 512] [--rows 4]

Rows of four sequences of random lengths, then of a single one, 8 heads over 2 of keys, 64 wide, float32. The sides take
turns in one process; seconds are medians, ratios are medians of the ratios within a turn, of CPU seconds and of the
clock. Temporaries are XLA's own account of the compiled program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models.blockwise import Blocks, blockwise_attention
from rlx.models.layers import Ids, visible
from rlx.models.packed_attention import packed_attention

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def packed(random: np.random.Generator, rows: int, tokens: int, sequences: int) -> Ids:
    begins = np.zeros((rows, tokens), bool)
    for row in begins:
        row[random.choice(tokens, sequences - 1, replace=False)] = True
    begins[:, 0] = True
    places = np.broadcast_to(np.arange(tokens), begins.shape)
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    ids = (positions, np.cumsum(begins, axis=1), np.zeros_like(places))
    return Ids(*(jnp.asarray(x, jnp.int32) for x in ids))


def compiled(block: int, tokens: int, arrays: list[jax.Array], ids: Ids) -> jax.stages.Compiled:
    """Value and gradients. block: 0 = whole."""

    def total(query: jax.Array, key: jax.Array, value: jax.Array, ids: Ids) -> jax.Array:
        if block:
            return (blockwise_attention(Blocks(block, None), query, key, value, ids) ** 2).sum()
        return (packed_attention(query, key, value, visible(ids, ids, None)) ** 2).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(*arrays, ids).compile()


def seconds(run: Callable[[], object]) -> np.ndarray:
    """Of the CPU and of the clock."""
    begin = time.process_time(), time.perf_counter()
    jax.block_until_ready(run())
    return np.asarray([time.process_time(), time.perf_counter()]) - begin


def measured(rows: int, tokens: int, sequences: int, blocks: list[int], repeats: int) -> None:
    random = np.random.default_rng(0)
    ids, heads = packed(random, rows, tokens, sequences), (HEADS, KV_HEADS, KV_HEADS)
    arrays = [jnp.asarray(random.normal(size=(rows, tokens, n, WIDTH)), jnp.float32) for n in heads]
    programs = {block: compiled(block, tokens, arrays, ids) for block in (0, *(b for b in blocks if b < tokens))}
    for program in programs.values():
        jax.block_until_ready(program(*arrays, ids))
    turns = [{b: seconds(lambda p=p: p(*arrays, ids)) for b, p in programs.items()} for _ in range(repeats)]
    for block, program in programs.items():
        said = program.memory_analysis()
        assert said is not None
        name = f"blocks of {block}" if block else "whole"
        took = np.median([turn[block] for turn in turns], axis=0)
        cpu, clock = np.median([turn[block] / turn[0] for turn in turns], axis=0)
        memory = said.temp_size_in_bytes / 2**20
        print(f"{tokens:6} {sequences:10} {name:>14} {took[0]:9.4f} {cpu:7.2f} {clock:7.2f} {memory:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{'tokens':>6} {'sequences':>10} {'scores':>14} {'CPU s':>9} {'ratio':>7} {'clock':>7} {'MiB':>9}")
    for tokens in given.lengths:
        for sequences in (4, 1):
            measured(given.rows, tokens, sequences, given.blocks, given.repeats)


if __name__ == "__main__":
    main()
