"""The blocks of layers that a stage of a circular pipeline holds: how they come to it, and how its loop uses them.

Which block is due in a tick is known only while the loop runs. Taken out of the stack plainly, a block would be kept
for the backward pass in every tick, and its gradient would be added to a sum as large as all of the stage's blocks. So
a layer gets its weights as `Taken` and looks them up itself, inside of what is recomputed; gradients go past that, and
are added in place to their part of the sum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, PyTree

# What costs nothing to compute again, looking weights up and giving them another shape or dtype among it.
FREE = frozenset(
    {"dynamic_slice", "squeeze", "reshape", "transpose", "convert_element_type", "broadcast_in_dim", "custom_jvp_call"}
)


@struct.dataclass
class Taken:
    """A weight of one repeat that is not looked up yet.

    Attributes:
      stack: of all repeats of the stage, [rounds * size, ...], without a gradient.
      at: the repeat.
      gradient: as large as the weight; nobody reads its value, the weight's gradient leaves through it.
    """

    stack: Array
    at: Array
    gradient: Array


def looked_up(tree: PyTree[Any]) -> PyTree[Array]:
    """`tree` with its weights in the place of what is `Taken`."""
    return jax.tree.map(_looked_up, tree, is_leaf=lambda x: isinstance(x, Taken))


def _looked_up(x: Any) -> Any:
    if not isinstance(x, Taken):
        return x
    return _differentiated_by(lax.dynamic_index_in_dim(x.stack, x.at, keepdims=False), x.gradient)


@jax.custom_jvp
def _differentiated_by(value: Array, gradient: Array) -> Array:
    return value


@_differentiated_by.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1]


def all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy for `jax.checkpoint`: everything is kept but what only looks weights up."""
    return primitive.name not in FREE


def draw(stacks: PyTree[Array], own: PyTree[Array], start: Array, size: int) -> tuple[PyTree[Array], PyTree[Array]]:
    """The block of `size` repeats that begins at `start`, to be scanned over with `taken`.

    own: the stage's parameters, [rounds * size, ...]. stacks: the same, carried from tick to tick for the sake of their
    gradients alone.

    Returns:
      (block, stacks to carry on). Weights in the block have gradients and values that nobody reads; integers are there.
    """
    leaves, structure = jax.tree.flatten(own)
    drawn = [
        _drawn(stack, start, size) if _is_weight(x) else (lax.dynamic_slice_in_dim(x, start, size), stack)
        for x, stack in zip(leaves, jax.tree.leaves(stacks), strict=True)
    ]
    block, onward = ([pair[i] for pair in drawn] for i in range(2))
    return jax.tree.unflatten(structure, block), jax.tree.unflatten(structure, onward)


def taken(own: PyTree[Array], at: Array, block: PyTree[Array]) -> PyTree[Any]:
    """Repeat `at` of the stage's; `block`: its part of what was drawn."""
    return jax.tree.map(lambda stack, part: Taken(stack, at, part) if _is_weight(stack) else part, own, block)


def _is_weight(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _drawn(stack: Array, start: Array, size: int) -> tuple[Array, Array]:
    return lax.dynamic_slice_in_dim(stack, start, size), stack


def _drawn_forward(stack: Array, start: Array, size: int) -> tuple[tuple[Array, Array], Array]:
    return _drawn(stack, start, size), start


def _drawn_backward(size: int, start: Array, gradients: tuple[Array, Array]) -> tuple[Array, None]:
    """In place: a plain slice would add an array of the stack's size, zero all over but for the block."""
    block, total = gradients
    summed = lax.dynamic_slice_in_dim(total, start, size) + block
    return lax.dynamic_update_slice_in_dim(total, summed, start, 0), None


_drawn.defvjp(_drawn_forward, _drawn_backward)


def deal(x: Array, stages: int, rounds: int) -> Array:
    """Neighbouring blocks [rounds * size, ...], those from stage * rounds on, for the blocks stage, stage + stages, ...
    Inside of a `shard_map` over 'pp'.

    In hand-over k every stage gives one block and gets one, as large as that. Stage s gives the one at place
    (k + s // (S / gcd(S, rounds))) mod rounds: stages that far apart would send those of one place to the same stage.
    """
    blocks = x.reshape(rounds, -1, *x.shape[1:])
    stage, period = lax.axis_index("pp"), stages // math.gcd(stages, rounds)
    dealt = jnp.zeros_like(blocks)
    for k in range(rounds):
        place = [(k + s // period) % rounds for s in range(stages)]
        numbers = [s * rounds + p for s, p in enumerate(place)]
        lands = [round_ for _, round_ in sorted((n % stages, n // stages) for n in numbers)]
        given = lax.dynamic_index_in_dim(blocks, jnp.asarray(place)[stage], keepdims=False)
        got = lax.ppermute(given, "pp", [(s, n % stages) for s, n in enumerate(numbers)])
        dealt = lax.dynamic_update_index_in_dim(dealt, got, jnp.asarray(lands)[stage], 0)
    return dealt.reshape(x.shape)


def dealt_share(stages: int, rounds: int) -> float:
    """Of a stage's blocks, those that come from other stages: on the stage that keeps the fewest."""
    kept = [sum(n % stages == s for n in range(s * rounds, (s + 1) * rounds)) for s in range(stages)]
    return 1 - min(kept) / rounds
