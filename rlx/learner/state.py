"""What the learner carries from update to update, and the optimizer that moves it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from rlx.config.schema import LearnerConfig, LoraConfig
from rlx.models.lora import init_adapter
from rlx.models.spec import Architecture, Params


@struct.dataclass
class LearnerState:
    """`trainable` is the LoRA adapter, or every parameter where lora.rank is 0; float32 either way."""

    version: Array  # int32 [], optimizer updates so far: the policy version that `trainable` is
    skipped: Array  # int32 [], updates skipped because loss or gradient was not finite
    skipped_in_row: Array  # int32 [], of these, since the last good one
    trainable: Params
    optimizer: optax.OptState


def learning_rate(config: LearnerConfig) -> optax.Schedule:
    """Updates -> learning rate: linear warm-up, at its peak with the last of its updates, then the schedule."""
    peak, warmup = config.learning_rate, config.warmup_updates
    rest = max(config.updates - warmup, 1)
    final = config.final_learning_rate_fraction
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * final, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=final),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup])


@functools.cache  # one for equal settings: programs know it by its identity
def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (arXiv 1711.05101; Adam where weight_decay is 0)."""
    adam = optax.adamw(
        learning_rate(config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    if not config.max_grad_norm:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adam)


def init_state(
    arch: Architecture, lora: LoraConfig, params: Params, optimizer: optax.GradientTransformation, key: jax.Array
) -> LearnerState:
    """A fresh state. With LoRA `params` stay frozen beside it; without, it starts from a float32 copy of them."""
    if lora.rank:
        trainable = init_adapter(arch, lora, key)
    else:
        trainable = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    # Three arrays, not one: a donated buffer may not appear twice.
    version, skipped, in_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    return LearnerState(version, skipped, in_row, trainable, optimizer.init(trainable))


def state_shardings(
    optimizer: optax.GradientTransformation, trained: PyTree[NamedSharding], shapes: Params, whole: NamedSharding
) -> LearnerState:
    """Where a state lies on a mesh: the optimizer's moments as the parameters they are of, counters on every device."""
    inner = jax.eval_shape(optimizer.init, shapes)
    moments = optax.tree.map_params(
        optimizer, lambda _, where: where, inner, trained, transform_non_params=lambda _: whole
    )
    counter: Any = whole
    return LearnerState(counter, counter, counter, trained, moments)
