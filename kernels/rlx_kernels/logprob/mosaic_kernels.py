"""The two Pallas (Mosaic GPU) kernels of the log-prob head, for Hopper. Every `plgpu` name of the project is here.

Both are one persistent matrix product hidden · headᵀ, whose logits never leave the registers whole. A cluster of two
thread blocks owns 256 rows; each block multiplies 128 rows by tiles of 256 columns, 64 deep. One warpgroup copies (the
head's tile is fetched once for both blocks), two multiply 64 rows each: m64n256k16 reads the least shared memory of
all shapes whose accumulators fit. A cluster walks a strip of tiles with the same rows, so that what it keeps for each
row stays in registers until the strip ends.

- `row_moments`, the online softmax with one more moment: a strip leaves (max, Σ e^(z-max), Σ e^(z-max) (z-max)) of
  each row, 12 bytes a row and strip, and XLA merges the strips.
- `dense_d_logits`: the logits again, turned into bfloat16 d_logits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUPS, CLUSTER, STAGES = 2, 2, 4  # matrix warpgroups of a block, blocks of a cluster, tiles in flight
GROUP_ROWS, TILE, DEPTH = 64, 256, 64  # rows of a warpgroup, columns and depth of a tile
BLOCK_ROWS = GROUPS * GROUP_ROWS
CLUSTER_ROWS = CLUSTER * BLOCK_ROWS
STORE_COLUMNS = 64  # of d_logits, in one store
ALIGNMENT = 16  # columns, the least that shared memory can be swizzled by
H200_CORES = 132
MAX_STRIP = 16  # tiles
SNAKE_WIDTH = 8  # clusters side by side that share tiles of the head: their rows stay in the L2 cache
LOG2_E = math.log2(math.e)
LOG2_ZERO = -300.0  # 2^-300 is 0 in float32: clamping here changes no value and keeps 0 · (-inf) out
LOWEST = -1e30


def row_moments(hidden, head, temperature: float, interpret: bool):
    """max z, Σ e^(z - max), Σ e^(z - max) (z - max): [T] each, of z = hidden [T, D] · head [V, D]ᵀ / temperature."""
    plan, *operands = _prepare(hidden, head, interpret)
    scale = LOG2_E / temperature
    shape = (3, plan.strips, plan.tokens)
    store = plgpu.SMEM((GROUPS, 3, GROUP_ROWS), jnp.float32)
    epilogue = functools.partial(_moments_epilogue, plan, scale)
    out = _launch("logprob_moments", plan, epilogue, store, (shape, jnp.float32), operands, interpret)
    top, mass, moment = out[:, :, : hidden.shape[0]]
    whole_top = top.max(0)
    shift = jnp.maximum((top - whole_top) * scale, LOG2_ZERO)
    keep = jnp.exp2(shift)
    return whole_top / temperature, (keep * mass).sum(0), (keep * (moment + shift * mass)).sum(0) / LOG2_E


def dense_d_logits(hidden, head, temperature: float, logsumexp, offset, g_entropy, interpret: bool):
    """p (offset - g_entropy log p) [T, V], bfloat16; log p = hidden [T, D] · head [V, D]ᵀ / temperature - logsumexp."""
    plan, *operands = _prepare(hidden, head, interpret)
    tokens = hidden.shape[0]
    of_rows = (logsumexp * LOG2_E, offset, g_entropy / -LOG2_E)
    operands += [jnp.pad(x, (0, plan.tokens - tokens)) for x in of_rows]
    tiled = _tiled(math.gcd(plan.columns, STORE_COLUMNS))  # a store starts at a multiple of these columns
    store = plgpu.SMEM((GROUPS, 2, GROUP_ROWS, STORE_COLUMNS), jnp.bfloat16, transforms=tiled)
    epilogue = functools.partial(_d_logits_epilogue, plan, LOG2_E / temperature)
    out_type = ((plan.tokens, plan.columns), jnp.bfloat16)
    out = _launch("logprob_d_logits", plan, epilogue, store, out_type, operands, interpret)
    return out[:tokens, plan.padding :]


def _prepare(hidden, head, interpret):
    """(plan, hidden [multiple of 256, D], head [plan.columns, D])"""
    tokens, vocab = hidden.shape[0], head.shape[0]
    rows = -(-tokens // CLUSTER_ROWS) * CLUSTER_ROWS
    plan = make_plan(rows, vocab, hidden.shape[1], 1 if interpret else _cores() // CLUSTER)
    return plan, jnp.pad(hidden, ((0, rows - tokens), (0, 0))), jnp.pad(head, ((plan.padding, 0), (0, 0)))


def _cores() -> int:
    """Of the GPU at hand; of an H200 where a program is lowered without one."""
    return jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else H200_CORES


class Plan(NamedTuple):
    """How the clusters share the logits: 256 rows by a strip of tiles at a time."""

    tokens: int
    vocab: int
    depth: int
    clusters: int
    strip: int  # tiles

    @property
    def bands(self) -> int:
        """Of 256 rows."""
        return self.tokens // CLUSTER_ROWS

    @property
    def strips(self) -> int:
        return -(-self.tiles // self.strip)

    @property
    def steps(self) -> int:
        return self.depth // DEPTH

    @property
    def columns(self) -> int:
        """Padding and the vocabulary: at least a tile, and tiles must start at multiples of 16."""
        return max(-(-self.vocab // ALIGNMENT) * ALIGNMENT, TILE)

    @property
    def padding(self) -> int:
        return self.columns - self.vocab

    @property
    def tiles(self) -> int:
        return -(-self.columns // TILE)

    def first_column(self, tile):
        """The last tile starts early, so that nothing is read or written out of bounds.

        It shares columns with the tile before it: both write the same values there, in any order.
        """
        return jnp.minimum(tile * TILE, self.columns - TILE)

    def place(self, index, block):
        """(first row, strip, its first tile, its tiles) of the block's `index`-th piece of work."""
        band, strip = plgpu.planar_snake(index, (self.bands, self.strips), 0, SNAKE_WIDTH)
        first = strip * self.strip
        return band * CLUSTER_ROWS + block * BLOCK_ROWS, strip, first, jnp.minimum(self.strip, self.tiles - first)


def make_plan(tokens: int, vocab: int, depth: int, clusters: int) -> Plan:
    """The longest strips of those that finish first."""
    plans = [Plan(tokens, vocab, depth, clusters, strip) for strip in range(MAX_STRIP, 0, -1)]
    return min(plans, key=lambda plan: -(-plan.bands * plan.strips // clusters) * min(plan.strip, plan.tiles))


class _Epilogue(NamedTuple):
    """What one warpgroup does with the logits of its 64 rows."""

    start: Callable[..., Any]  # (rows) -> carry
    tile: Callable[..., Any]  # (carry, logits [64, 256], tile, rows) -> carry
    finish: Callable[..., None]  # (carry, strip, rows)


def _rows_layout():
    return plgpu.Layout.WGMMA.reduce(1)


def _over_columns(rows):
    return lax.broadcast_in_dim(rows, (GROUP_ROWS, TILE), (0,))


def _work(plan, body):
    """body(index, steps done before) -> steps done after, over this cluster's share."""
    return plgpu.nd_loop((plan.bands * plan.strips,), collective_axes="cluster", init_carry=jnp.int32(0))(
        lambda info, carry: body(info.index[0], carry)
    )


class _Buffers(NamedTuple):
    hidden: Any  # [STAGES, BLOCK_ROWS, DEPTH]
    head: Any  # [STAGES, TILE, DEPTH]
    full: Any
    free: Any


def _copy(plan, hidden, head, buffers):
    """The copying warpgroup: tile after tile, without a pause between strips."""
    plgpu.set_max_registers(40, action="decrease")
    block = lax.axis_index("block")

    def work(index, done):
        row, _, first, tiles = plan.place(index, block)

        def step(i, done):
            column = plan.first_column(first + lax.div(i, plan.steps))
            depth = pl.ds(lax.rem(i, plan.steps) * DEPTH, DEPTH)
            slot = lax.rem(done, STAGES)

            @pl.when(done >= STAGES)
            def _wait_for_both_blocks():
                plgpu.barrier_wait(buffers.free.at[slot])

            full = buffers.full.at[slot]
            plgpu.copy_gmem_to_smem(hidden.at[pl.ds(row, BLOCK_ROWS), depth], buffers.hidden.at[slot], full)
            tile = head.at[pl.ds(column, TILE), depth]
            plgpu.copy_gmem_to_smem(tile, buffers.head.at[slot], full, collective_axes="block")
            return done + 1

        return lax.fori_loop(0, tiles * plan.steps, step, done)

    done = _work(plan, work)

    # a block that ended early would be signalled by its neighbour when it is gone
    @pl.loop(jnp.maximum(done - STAGES, 0), done)
    def _drain(i):
        plgpu.barrier_wait(buffers.free.at[lax.rem(i, STAGES)])


def _multiply(plan, epilogue, buffers):
    """A matrix warpgroup: the logits of its 64 rows, tile after tile, each handed to the epilogue."""
    plgpu.set_max_registers(232, action="increase")
    block, group = lax.axis_index("block"), lax.axis_index("group")
    own = pl.ds(group * GROUP_ROWS, GROUP_ROWS)

    def logits(done, accumulator):
        def step(i, _):
            slot = lax.rem(done + i, STAGES)
            plgpu.barrier_wait(buffers.full.at[slot])
            plgpu.wgmma(accumulator, buffers.hidden.at[slot, own], buffers.head.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # the product before this one is done with its tiles

            @pl.when(i > 0)
            def _free():
                plgpu.barrier_arrive(buffers.free.at[lax.rem(done + i - 1, STAGES)])

        lax.fori_loop(0, plan.steps, step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(buffers.free.at[lax.rem(done + plan.steps - 1, STAGES)])
        return accumulator[...]

    def work(index, done):
        row, strip, first, tiles = plan.place(index, block)
        rows = pl.ds(row + group * GROUP_ROWS, GROUP_ROWS)

        def tile(i, carry):
            done, kept = carry
            z = pl.run_scoped(functools.partial(logits, done), plgpu.ACC((GROUP_ROWS, TILE), jnp.float32))
            return done + plan.steps, epilogue.tile(kept, z, first + i, rows)

        done, kept = lax.fori_loop(0, tiles, tile, (done, epilogue.start(rows)))
        epilogue.finish(kept, strip, rows)
        return done

    _work(plan, work)
    plgpu.wait_smem_to_gmem(0)


def _launch(name, plan, make_epilogue, store, out_type, operands, interpret):
    """Run the product; `make_epilogue(*operands after hidden and head, out, this warpgroup's store)` says what for."""

    def kernel(*refs):
        hidden, head, *others = refs[: len(operands)]
        out, store, *tiles = refs[len(operands) :]
        group, buffers = lax.axis_index("group"), _Buffers(*tiles)
        pl.when(group == GROUPS)(lambda: _copy(plan, hidden, head, buffers))
        pl.when(group < GROUPS)(lambda: _multiply(plan, make_epilogue(*others, out, store.at[group]), buffers))

    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(*out_type, manual_axis_type=jax.sharding.ManualAxisType(varying=varying)),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(CLUSTER,),
        cluster_names=("block",),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name=name,
        scratch_types=(
            store,
            plgpu.SMEM((STAGES, BLOCK_ROWS, DEPTH), jnp.bfloat16, transforms=_tiled(DEPTH)),
            plgpu.SMEM((STAGES, TILE, DEPTH), jnp.bfloat16, transforms=_tiled(DEPTH)),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=GROUPS, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*operands)


def _tiled(columns):
    """The layout of shared memory that products and stores read: 8 rows by up to 128 bytes, swizzled."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)  # type: ignore[abstract]


def _moments_epilogue(plan, scale, out, store):
    """Max of the products, Σ 2^c and Σ 2^c c of c = (product - max) · scale."""

    def full(value):
        return plgpu.layout_cast(jnp.full((GROUP_ROWS,), value, jnp.float32), _rows_layout())

    def tile(carry, z, tile, rows):
        top, mass, moment = carry
        seen = jnp.maximum(tile * TILE, plan.padding) - plan.first_column(tile)
        columns = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
        z = jnp.where(columns >= seen, z, LOWEST)
        higher = jnp.maximum(top, z.max(axis=1))
        centred = jnp.maximum((z - _over_columns(higher)) * scale, LOG2_ZERO)
        weights = jnp.exp2(centred)
        shift = jnp.maximum((top - higher) * scale, LOG2_ZERO)
        keep = jnp.exp2(shift)
        moment = keep * (moment + shift * mass) + (weights * centred).sum(axis=1)
        return higher, keep * mass + weights.sum(axis=1), moment

    def finish(carry, strip, rows):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, x in enumerate(carry):
            store[i] = x
        plgpu.commit_smem()
        for i in range(3):
            plgpu.copy_smem_to_gmem(store.at[i], out.at[i, strip, rows])

    return _Epilogue(lambda rows: (full(LOWEST), full(0.0), full(0.0)), tile, finish)


def _d_logits_epilogue(plan, scale, logsumexp, offset, slope, out, store):
    """2^c (offset + slope · c) of c = product · scale - logsumexp, in bfloat16."""

    def start(rows):
        return tuple(plgpu.load(x.at[rows], layout=_rows_layout(), optimized=False) for x in (logsumexp, offset, slope))

    def tile(carry, z, tile, rows):
        lse, offset, slope = (_over_columns(x) for x in carry)
        logprob = jnp.maximum(z * scale - lse, LOG2_ZERO)
        d_logits = (jnp.exp2(logprob) * (offset + slope * logprob)).astype(jnp.bfloat16)
        for i in range(TILE // STORE_COLUMNS):
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            store[i % 2] = d_logits[:, i * STORE_COLUMNS : (i + 1) * STORE_COLUMNS]
            plgpu.commit_smem()
            columns = pl.ds(plan.first_column(tile) + i * STORE_COLUMNS, STORE_COLUMNS)
            plgpu.copy_smem_to_gmem(store.at[i % 2], out.at[rows, columns])
        return carry

    return _Epilogue(start, tile, lambda carry, strip, rows: None)
