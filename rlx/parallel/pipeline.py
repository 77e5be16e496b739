"""A pipeline over the mesh's axis 'pp': stages of layers, micro-batches that pass through them.

GPipe (arXiv 1811.06965): in step t stage s works on micro-batch t - s, and hands its result on. The loop is manual over
'pp' only; everything inside is partitioned over the other axes by XLA as without a pipeline. Layers are stacked
[repeats, ...] outside; stage stacking is a reshape in here, with repeats that are missing for whole stages padded and
skipped, so that no checkpoint knows of stages.

The last stage's results are summed onto all stages, so that head and loss can be cut over 'pp' too and are computed
once, not on every stage for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from rlx.parallel.mesh import Placement

# (inputs, carry, one repeat's parameters) -> (carry, made)
Step = Callable[[PyTree[Array], PyTree[Array], PyTree[Array]], tuple[PyTree[Array], Any]]


def split(x: Array, parts: int) -> Array:
    """[rows, ...] as [parts, rows of each, ...]: a part has rows from everywhere, so that rows which are cut over dp
    stay where they are."""
    return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)


def joined(x: Array) -> Array:
    """`split` undone."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


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
    stages = placement.layout.pp
    size = -(-repeats // stages)
    there = jnp.arange(stages * size).reshape(stages, size) < repeats
    staged = jax.tree.map(lambda x: _staged(x, stages, size), stacked)
    manual = jax.shard_map(
        lambda *x: _stage(step, stages, *x),
        mesh=placement.mesh,
        in_specs=(PartitionSpec("pp"), PartitionSpec("pp"), PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(), PartitionSpec("pp")),
        axis_names={"pp"},
        check_vma=False,  # with it jax cannot lower the gradient of what has a `shard_map` of its own, as experts do
    )
    carry, made = manual(staged, there, inputs, carry)
    return carry, jax.tree.map(lambda x: x.reshape(stages * size, *x.shape[2:])[:repeats], made)


def _staged(x: Array, stages: int, size: int) -> Array:
    padded = jnp.pad(x, [(0, stages * size - len(x)), *[(0, 0)] * (x.ndim - 1)])
    return padded.reshape(stages, size, *x.shape[1:])


def _stage(step: Step, stages: int, staged: Any, there: Array, inputs: Any, carry: Any) -> tuple[Any, Any]:
    """What one stage does: [1, size, ...] of the parameters is its own."""
    own, there = jax.tree.map(lambda x: x[0], (staged, there))
    stage = jax.lax.axis_index("pp")
    count = len(jax.tree.leaves(carry)[0])

    def repeat(inside: Any, held: Any, x: tuple) -> tuple[Any, Any]:
        parameters, is_there = x
        new, made = step(inside, held, parameters)
        return jax.tree.map(lambda a, b: jnp.where(is_there, a, b), new, held), made

    def tick(held: Any, t: Array) -> tuple[Any, tuple[Any, Any]]:
        mine = jnp.clip(t - stage, 0, count - 1)
        fresh = jax.tree.map(lambda x: x[mine], carry)
        held = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), fresh, held)
        inside = jax.tree.map(lambda x: x[mine], inputs)
        done, made = jax.lax.scan(lambda h, x: repeat(inside, h, x), held, (own, there))
        onward = [(i, i + 1) for i in range(stages - 1)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, "pp", onward), done), (done, made)

    empty = jax.tree.map(lambda x: jnp.zeros_like(x[0]), carry)
    _, (done, made) = jax.lax.scan(tick, empty, jnp.arange(count + stages - 1))
    last = jax.tree.map(lambda x: _from_last(x[stages - 1 :], stage == stages - 1), done)
    # Stage s made its part for micro-batch m in step m + s.
    made = jax.tree.map(lambda x: jnp.swapaxes(x[stage + jnp.arange(count)], 0, 1)[None], made)
    return last, made


def _from_last(x: Array, is_last: Array) -> Array:
    return jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), "pp")
