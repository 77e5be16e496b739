"""One optimizer update: model, output head, objective and optimizer joined in one jitted function.

The whole batch is on the device, [M, R, T]; a loop over its used micro-batches adds up loss, gradient and metric sums.
Every denominator is that of the whole batch and is computed before the loop, so the result does not depend on how the
batch is cut. An update whose loss, gradient or new weights are not finite changes nothing but the counters.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array
from rlx_kernels.logprob import token_stats

from rlx.algos.aggregation import aggregation_weights
from rlx.algos.objective import Metrics, Targets, objective
from rlx.config.objective import ObjectiveConfig
from rlx.learner.state import LearnerState
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import forward, head_matrix


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What an update is compiled for."""

    arch: Architecture
    objective: ObjectiveConfig
    adapter_scale: float | None  # None: no adapter, every parameter is trained
    temperature: float  # the sampler's, so that both sides mean the same distribution
    remat: bool
    dtype: str  # of the model's matrix products
    logprob_implementation: str | None
    num_sequences: int  # the most trajectories a batch may hold


@struct.dataclass
class Batch:
    """The device's form of `rlx.data.packing.PackedBatch`; see there for shapes."""

    tokens: Array
    positions: Array
    segment_ids: Array
    source: Array
    target_tokens: Array
    mask: Array
    sequences: Array
    advantages: Array
    sampler_logprobs: Array
    ages: Array
    head_ids: Array | None
    head_logprobs: Array | None
    num_micro_batches: Array  # int32 []


def combine(config: StepConfig, frozen: Params, trainable: Params) -> tuple[Params, Params | None]:
    """(parameters, adapter) of the forward pass."""
    if config.adapter_scale is None:
        return jax.tree.map(lambda x: x.astype(config.dtype), trainable), None
    return frozen, trainable


def batch_targets(config: StepConfig, batch: Batch) -> Targets:
    """What the objective knows of the batch, flat over rows: [M, R * N]."""
    count = batch.mask.shape[0]
    flat = lambda x: x.reshape(count, -1)  # noqa: E731
    heads = lambda x: None if x is None else x.reshape(count, -1, x.shape[-1])  # noqa: E731
    weights = aggregation_weights(
        config.objective, batch.mask.ravel(), batch.sequences.ravel(), num_sequences=config.num_sequences
    )
    return Targets(
        mask=flat(batch.mask),
        weights=flat(weights),
        advantages=flat(batch.advantages),
        tokens=flat(batch.target_tokens),
        sequences=flat(batch.sequences),
        sampler_logprobs=flat(batch.sampler_logprobs),
        ages=flat(batch.ages),
        head_ids=heads(batch.head_ids),
        head_logprobs=heads(batch.head_logprobs),
    )


def slice_loss(
    config: StepConfig, trainable: Params, frozen: Params, batch: Batch, targets: Targets, i: Array
) -> tuple[Array, Metrics]:
    """Loss and metric sums of micro-batch `i`: its share of the whole batch's."""
    params, adapter = combine(config, frozen, trainable)
    hidden = forward(
        config.arch,
        params,
        batch.tokens[i],
        batch.positions[i],
        batch.segment_ids[i],
        adapter=adapter,
        adapter_scale=config.adapter_scale or 1.0,
        remat=config.remat,
    )
    predicting = jnp.take_along_axis(hidden, batch.source[i][..., None], axis=1)
    part = jax.tree.map(lambda x: x[i], targets)
    stats = token_stats(
        predicting.reshape(-1, predicting.shape[-1]),
        head_matrix(params),
        part.tokens,
        part.head_ids,
        temperature=config.temperature,
        implementation=config.logprob_implementation,
    )
    return objective(config.objective, stats, part)


def accumulate(config: StepConfig, trainable: Params, frozen: Params, batch: Batch) -> tuple[Array, Params, Metrics]:
    """Loss, gradient and metric sums of the whole batch."""
    targets = batch_targets(config, batch)
    gradient_of = jax.value_and_grad(partial(slice_loss, config), has_aux=True)

    def micro(i: Array) -> tuple[Array, Params, Metrics]:
        (loss, metrics), gradient = gradient_of(trainable, frozen, batch, targets, i)
        return loss, gradient, metrics

    def body(i: Array, total: tuple[Array, Params, Metrics]) -> tuple[Array, Params, Metrics]:
        loss, gradient, metrics = micro(i)
        return total[0] + loss, jax.tree.map(jnp.add, total[1], gradient), total[2].merge(metrics)

    # The first micro-batch gives the sums their structure; a loop over an empty batch would have none.
    return jax.lax.fori_loop(1, batch.num_micro_batches, body, micro(jnp.int32(0)))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update(
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    state: LearnerState,
    frozen: Params,
    batch: Batch,
) -> tuple[LearnerState, dict[str, Array], Metrics]:
    """(new state, optimizer scalars, objective metric sums). `state` is donated.

    Scalars: loss, grad_norm (before clipping), update_norm, finite (1 where the update was made).
    """
    loss, gradient, metrics = accumulate(config, state.trainable, frozen, batch)
    grad_norm = optax.tree.norm(gradient)
    changes, optimizer_state = optimizer.update(gradient, state.optimizer, state.trainable)
    trainable = optax.apply_updates(state.trainable, changes)
    # A finite gradient does not make finite weights: a step may overflow them.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(trainable))
    keep = partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    new = LearnerState(
        version=state.version + finite,
        skipped=state.skipped + ~finite,
        skipped_in_row=jnp.where(finite, 0, state.skipped_in_row + 1),
        trainable=keep(trainable, state.trainable),
        optimizer=keep(optimizer_state, state.optimizer),
    )
    scalars = {
        "loss": loss,
        "grad_norm": grad_norm,
        "update_norm": jnp.where(finite, optax.tree.norm(changes), 0.0),
        "finite": finite,
    }
    return new, scalars, metrics
