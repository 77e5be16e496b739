"""A pipeline over the mesh's axis 'pp': stages of layers, micro-batches that pass through them.

With one block of layers a stage (GPipe, arXiv 1811.06965) stage s works on micro-batch t - s in tick t, and hands its
result on. With v blocks a stage (interleaved, arXiv 2104.04473, section 2.2) stage s holds the blocks s, s + S, ... of
v S; micro-batches go round the ring of stages v times, in groups of S, so that each comes back to the first stage just
when that has sent the last of its group on. A tick is a v-th as long, there are v M + S - 1, and a stage waits for
(S - 1) / (v M + S - 1) of them. All go forward before the first goes backward, as in GPipe.

The loop is manual over 'pp' only; everything inside is partitioned over the other axes by XLA as without a pipeline.
Layers are stacked [repeats, ...] outside; stage stacking is a reshape in here, with repeats that are missing for whole
stages padded and skipped, so that no checkpoint knows of stages. Outside a stage's share of a stack is a run of
neighbouring layers: more than one block a stage are dealt out in the program, which takes room for a second copy of a
stage's weights and sends most of them once a call (`blocks`).

The last stage's results are summed onto all stages, so that head and loss can be cut over 'pp' too and are computed
once, not on every stage for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from rlx.parallel import blocks
from rlx.parallel.layout import rounds_of, ticks
from rlx.parallel.mesh import Placement

# (inputs, carry, one repeat's parameters, which may be `blocks.Taken`) -> (carry, made)
Step = Callable[[PyTree[Array], PyTree[Array], PyTree[Any]], tuple[PyTree[Array], Any]]


def split(x: Array, parts: int) -> Array:
    """[rows, ...] as [parts, rows of each, ...]: a part has rows from everywhere, so that rows which are cut over dp
    stay where they are."""
    return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)


def joined(x: Array) -> Array:
    """`split` undone."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


class Schedule(NamedTuple):
    """Who does what when. A stage's work is counted in units, a block for a micro-batch each; stage s does unit u in
    tick u + s."""

    stages: int
    rounds: int  # blocks a stage
    size: int  # repeats a block
    parts: int  # micro-batches
    ticks: int
    neighbours: bool  # a stage is given a run of neighbouring layers, out of which its blocks are dealt

    def at(self, unit: Array) -> tuple[Array, Array]:
        """(round, micro-batch) of a unit."""
        if self.rounds == 1:
            return jnp.zeros_like(unit), unit
        group, within = jnp.divmod(unit, self.stages * self.rounds)
        number, place = jnp.divmod(within, self.stages)
        return number, group * self.stages + place

    def units(self) -> np.ndarray:
        """Of each round and micro-batch, [rounds, parts]."""
        group, place = np.divmod(np.arange(self.parts), self.stages)
        return np.arange(self.rounds)[:, None] * self.stages + group * self.stages * self.rounds + place


def schedule_of(placement: Placement, repeats: int, parts: int) -> Schedule:
    """Raises ValueError for micro-batches that make no whole groups."""
    stages, rounds = placement.layout.pp, rounds_of(repeats, placement.layout, placement.rounds)
    if rounds > 1 and parts % stages:
        raise ValueError(f"{parts} micro-batches go round {stages} stages in groups of {stages}: take a multiple of it")
    size = -(-repeats // (stages * rounds))
    # A stack that the stages do not divide is not cut by layers (`rules`): its blocks are taken in the order they go.
    neighbours = rounds == 1 or repeats % stages == 0
    return Schedule(stages, rounds, size, parts, ticks(placement.layout, parts, rounds), neighbours)


def run(
    placement: Placement,
    step: Step,
    inputs: PyTree[Array],
    carry: PyTree[Array],
    stacked: PyTree[Array],
    repeats: int,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """`step` over all repeats for every micro-batch.

    Args:
      inputs: what every repeat sees of a micro-batch; leaves lead with the micro-batches.
      carry: what goes from repeat to repeat; leaves lead with the micro-batches.
      stacked: leaves lead with the repeats.

    Returns:
      (carry, made): `made` leads with [repeats, micro_batches].
    """
    schedule = schedule_of(placement, repeats, len(jax.tree.leaves(carry)[0]))
    stages, rounds, size = schedule[:3]
    there = _by_stage(jnp.arange(stages * rounds * size), schedule) < repeats
    staged = jax.tree.map(partial(_staged, schedule=schedule), stacked)
    manual = jax.shard_map(
        lambda *x: _stage(step, schedule, *x),
        mesh=placement.mesh,
        in_specs=(PartitionSpec("pp"), PartitionSpec("pp"), PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec("pp")),
        axis_names={"pp"},
        check_vma=False,  # with it jax cannot lower the gradient of what has a `shard_map` of its own, as experts do
    )
    carry, made = manual(staged, there, inputs, carry)
    # [stages, rounds, size, ...] in the order of layers.
    ordered = lambda x: jnp.swapaxes(x, 0, 1).reshape(stages * rounds * size, *x.shape[3:])  # noqa: E731
    return carry, jax.tree.map(lambda x: ordered(x)[:repeats], made)


def _staged(x: Array, schedule: Schedule) -> Array:
    """[repeats, ...] as [stages, rounds * size, ...]."""
    stages, rounds, size = schedule[:3]
    padded = jnp.pad(x, [(0, stages * rounds * size - len(x)), *[(0, 0)] * (x.ndim - 1)])
    if schedule.neighbours:
        return padded.reshape(stages, rounds * size, *x.shape[1:])
    return _by_stage(padded, schedule)


def _by_stage(x: Array, schedule: Schedule) -> Array:
    """Padded layers as [stages, rounds * size, ...], each stage's own blocks one after the other."""
    stages, rounds, size = schedule[:3]
    in_blocks = x.reshape(rounds, stages, size, *x.shape[1:])
    return jnp.swapaxes(in_blocks, 0, 1).reshape(stages, rounds * size, *x.shape[1:])


def _stage(step: Step, schedule: Schedule, staged: Any, there: Array, inputs: Any, carry: Any) -> tuple[Any, Any]:
    """What one stage does: [1, rounds * size, ...] of the parameters is its own."""
    stages, rounds, size = schedule[:3]
    own, there = jax.tree.map(lambda x: x[0], (staged, there))
    if rounds > 1 and schedule.neighbours:
        own = jax.tree.map(lambda x: blocks.deal(x, stages, rounds), own)
    values = jax.lax.stop_gradient(own)
    stage, units = jax.lax.axis_index("pp"), schedule.units()

    def repeat(inside: Any, held: Any, x: tuple) -> tuple[Any, Any]:
        parameters, is_there = x
        new, made = step(inside, held, parameters)
        return jax.tree.map(lambda a, b: jnp.where(is_there, a, b), new, held), made

    def block(number: Array, stacks: Any, inside: Any, held: Any) -> tuple[Any, Any, Any]:
        if rounds == 1:
            return *jax.lax.scan(lambda h, x: repeat(inside, h, x), held, (own, there)), stacks
        start = number * size
        drawn, stacks = blocks.draw(stacks, values, start, size)
        each = lambda h, x: repeat(inside, h, (blocks.taken(values, *x), there[x[0]]))  # noqa: E731
        return *jax.lax.scan(each, held, (start + jnp.arange(size), drawn)), stacks

    def tick(state: Any, t: Array) -> tuple[Any, Any]:
        held, done, stacks = state
        number, mine = schedule.at(jnp.clip(t - stage, 0, units.size - 1))
        fresh = jax.tree.map(lambda x: x[mine], carry)
        held = jax.tree.map(lambda a, b: jnp.where((stage == 0) & (number == 0), a, b), fresh, held)
        inside = jax.tree.map(lambda x: x[mine], inputs)
        held, made, stacks = block(number, stacks, inside, held)
        # What earlier rounds made is written over, as is what the last stage made before its first unit.
        put = lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, mine, 0)  # noqa: E731
        done = jax.tree.map(put, done, held) if rounds > 1 else ()
        onward = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else stages - 1)]
        handed = jax.tree.map(lambda x: jax.lax.ppermute(x, "pp", onward), held)
        return (handed, done, stacks), (made, held if rounds == 1 else ())

    empty = jax.tree.map(lambda x: jnp.zeros_like(x[0]), carry)
    circular = (jax.tree.map(jnp.zeros_like, carry), own) if rounds > 1 else ((), ())
    (_, done, _), (made, each) = jax.lax.scan(tick, (empty, *circular), jnp.arange(schedule.ticks))
    done = jax.tree.map(lambda x: x[stages - 1 :], each) if rounds == 1 else done
    last = jax.tree.map(lambda x: _from_last(x, stage == stages - 1), done)
    made = jax.tree.map(lambda x: jnp.swapaxes(x[stage + units], 1, 2)[None], made)
    return last, made


def _from_last(x: Array, is_last: Array) -> Array:
    return jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), "pp")
