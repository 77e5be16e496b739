"""One optimizer update: model, output head, objective and optimizer joined.

Two jitted functions: one adds the loss, gradient and metric sums of a micro-batch to those of the micro-batches before
it, one applies the sum. Only what a batch holds is shipped and computed, and nothing recompiles for another number of
micro-batches. Every denominator is that of the whole batch and known beforehand, so the result does not depend on how
the batch is cut. An update whose loss, gradient or new weights are not finite changes nothing but the counters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from rlx_kernels.logprob import Precision, TokenStats, token_stats

from rlx.algos.aggregation import weights_of_slice
from rlx.algos.objective import Metrics, Targets, objective
from rlx.config.objective import ObjectiveConfig
from rlx.learner.head import sharded_token_stats
from rlx.learner.routing import NO_LOSSES, RouterLosses, with_routing
from rlx.learner.state import LearnerState
from rlx.models.moe import Routing
from rlx.models.placed import keeps_order
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import Remat, forward_routed, head_matrix
from rlx.parallel.context import places, zigzag
from rlx.parallel.mesh import Placement
from rlx.types import RowShape

# Loss, gradient and metric sums.
Total = tuple[Array, Params, Metrics]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What an update is compiled for."""

    arch: Architecture
    objective: ObjectiveConfig
    adapter_scale: float | None  # None: no adapter, every parameter is trained
    temperature: float  # the sampler's, so that both sides mean the same distribution
    remat: Remat
    dtype: str  # of the model's matrix products
    logprob_implementation: str | None
    num_sequences: int  # the most trajectories a batch may hold
    router_losses: RouterLosses = NO_LOSSES
    head_precision: Precision | None = None  # of the output head's products; None: what the dtypes say
    unrolled: bool = False  # layers one after the other in the program, not in a loop
    placement: Placement | None = None  # the devices that share an update, None = one
    attention_block: int = 0  # tokens whose attention scores exist at once, 0 = all of a row's


@struct.dataclass
class MicroBatch:
    """R rows of T tokens and their N targets: the device's form of a slice of `rlx.data.packing.PackedBatch`."""

    tokens: Array  # int32 [R, T]
    positions: Array
    segment_ids: Array
    prefix_ids: Array
    source: Array  # int32 [R, N]
    target_tokens: Array
    mask: Array
    sequences: Array
    lengths: Array
    advantages: Array
    sampler_logprobs: Array
    ages: Array
    head_ids: Array | None  # int32 [R, N, K]
    head_logprobs: Array | None
    routes: Array | None  # int32 [R, T, layers of experts, k], an engine's choices to replay; negative: none recorded
    num_targets: Array  # int32 [], of the whole batch
    num_sequences: Array  # int32 [], of the whole batch
    frozen: dict[str, Array] = struct.field(default_factory=dict)  # further `Targets`, [R, N] or [R, N, K] each
    row_shape: RowShape | None = struct.field(pytree_node=False, default=None)  # of the parts of a row, None = anywhere


# All of a batch's micro-batches, at least one.
Batch = Sequence[MicroBatch]


def combine(config: StepConfig, frozen: Params, trainable: Params) -> tuple[Params, Params | None]:
    """(parameters, adapter) of the forward pass."""
    if config.adapter_scale is None:
        return jax.tree.map(lambda x: x.astype(config.dtype), trainable), None
    return frozen, trainable


def slice_targets(config: StepConfig, batch: MicroBatch) -> Targets:
    """What the objective knows of the micro-batch, flat over rows: [R · N]."""
    heads = lambda x: None if x is None else x.reshape(-1, x.shape[-1])  # noqa: E731
    weights = weights_of_slice(config.objective, batch.mask, batch.lengths, batch.num_targets, batch.num_sequences)
    return Targets(
        mask=batch.mask.ravel(),
        weights=weights.ravel(),
        advantages=batch.advantages.ravel(),
        tokens=batch.target_tokens.ravel(),
        sequences=batch.sequences.ravel(),
        lengths=batch.lengths.ravel(),
        sampler_logprobs=batch.sampler_logprobs.ravel(),
        ages=batch.ages.ravel(),
        head_ids=heads(batch.head_ids),
        head_logprobs=heads(batch.head_logprobs),
        **{name: x.reshape(-1, *x.shape[2:]) for name, x in batch.frozen.items()},
    )


def slice_loss(config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch) -> tuple[Array, Metrics]:
    """Loss and metric sums of a micro-batch: its share of the whole batch's."""
    stats, targets, routing = slice_stats(config, trainable, frozen, batch)
    loss, metrics = objective(config.objective, stats, targets)
    share = batch.mask.sum() / batch.num_targets
    return with_routing(config.router_losses, routing, share, loss, metrics)


def slice_stats(
    config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch
) -> tuple[TokenStats, Targets, Routing | None]:
    """What the model says of a micro-batch's targets, flat over rows; the targets; what the routers did."""
    params, adapter = combine(config, frozen, trainable)
    hidden, routing = hidden_of_targets(config, params, adapter, batch)
    targets, head = slice_targets(config, batch), head_matrix(params)
    candidates = targets.head_ids
    if config.objective.distill.form == "full":
        candidates = jnp.broadcast_to(jnp.arange(len(head)), (len(hidden), len(head)))
    return stats_of_hidden(config, hidden, head, targets.tokens, candidates), targets, routing


def hidden_of_targets(
    config: StepConfig, params: Params, adapter: Params | None, batch: MicroBatch
) -> tuple[Float[Array, "targets d"], Routing | None]:
    """The hidden states that predict a micro-batch's targets, flat over rows; what the routers did."""
    batch = _laid_out(config, batch)
    hidden, routing = forward_routed(
        config.arch,
        params,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        batch.prefix_ids,
        routes=batch.routes,
        adapter=adapter,
        adapter_scale=config.adapter_scale or 1.0,
        remat=config.remat,
        unrolled=config.unrolled,
        placement=config.placement,
        attention_block=config.attention_block,
        row_shape=batch.row_shape,
    )
    if config.placement is not None:  # a target may look anywhere in its row
        hidden = config.placement.cut(hidden, PartitionSpec("dp"))
    predicting = jnp.take_along_axis(hidden, batch.source[..., None], axis=1)
    return predicting.reshape(-1, predicting.shape[-1]), routing


def stats_of_hidden(
    config: StepConfig,
    hidden: Float[Array, "targets d"],
    head: Float[Array, "vocab d"],
    tokens: Int[Array, " targets"],
    candidates: Int[Array, "targets k"] | None,
) -> TokenStats:
    """The output head's, over all devices of a mesh."""
    stats_of = token_stats if config.placement is None else partial(sharded_token_stats, config.placement)
    return stats_of(
        hidden,
        head,
        tokens,
        candidates,
        temperature=config.temperature,
        precision=config.head_precision,
        implementation=config.logprob_implementation,
    )


def _laid_out(config: StepConfig, batch: MicroBatch) -> MicroBatch:
    """Rows with their tokens in the order in which devices hold them."""
    if config.placement is None or keeps_order(config.arch):
        return batch
    order = zigzag(batch.tokens.shape[1], config.placement.layout.cp)
    moved = lambda x: x[:, order]  # noqa: E731
    return dataclasses.replace(
        batch,
        tokens=moved(batch.tokens),
        positions=moved(batch.positions),
        segment_ids=moved(batch.segment_ids),
        prefix_ids=moved(batch.prefix_ids),
        routes=None if batch.routes is None else moved(batch.routes),
        source=jnp.asarray(places(order))[batch.source],
    )


@partial(jax.jit, static_argnums=0, inline=True)  # traced once for all who ask for its shapes or its program
def slice_gradient(config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch) -> Total:
    """Loss, gradient and metric sums of a micro-batch."""
    gradient_of = jax.value_and_grad(partial(slice_loss, config), has_aux=True)
    (loss, metrics), gradient = gradient_of(trainable, frozen, batch)
    return _in_place(config, (loss, gradient, metrics))


def _in_place(config: StepConfig, total: Total) -> Total:
    """On a mesh: gradients where their parameters are, loss and sums whole on every device."""
    placement = config.placement
    if placement is None or placement.trained is None:
        return total
    whole = PartitionSpec()
    return placement.cut(total, (whole, placement.trained.tree, whole))


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
    return apply(optimizer, state, accumulate(config, state.trainable, frozen, batch))


def compile_update(
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    state: LearnerState,
    frozen: Params,
    micro_batch: MicroBatch,
) -> None:
    """Compile what `update` runs on arrays like these, and run nothing: in a thread while others generate or load.

    An update that begins meanwhile compiles for itself, so it should wait for the end.
    """
    given = (config, state.trainable, frozen, micro_batch)
    zero = zero_total.lower(*given).compile()
    total = jax.eval_shape(partial(slice_gradient, config), *given[1:])
    if config.placement is not None:
        placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)  # noqa: E731
        total = jax.tree.map(placed, total, zero.output_shardings)
    add_slice.lower(*given, total).compile()
    apply.lower(optimizer, state, total).compile()


def accumulate(config: StepConfig, trainable: Params, frozen: Params, batch: Batch) -> Total:
    """Loss, gradient and metric sums of the whole batch."""
    total = zero_total(config, trainable, frozen, batch[0])
    for micro_batch in batch:
        total = add_slice(config, trainable, frozen, micro_batch, total)
    return total


@partial(jax.jit, static_argnums=0)
def zero_total(config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch) -> Total:
    """Where adding up begins. Nothing but shapes is computed."""
    shapes = jax.eval_shape(partial(slice_gradient, config), trainable, frozen, batch)
    return _in_place(config, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def add_slice(config: StepConfig, trainable: Params, frozen: Params, batch: MicroBatch, total: Total) -> Total:
    """`total`, which is donated, with a micro-batch added."""
    loss, gradient, metrics = slice_gradient(config, trainable, frozen, batch)
    return _in_place(config, (total[0] + loss, jax.tree.map(jnp.add, total[1], gradient), total[2].merge(metrics)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def apply(
    optimizer: optax.GradientTransformation, state: LearnerState, total: Total
) -> tuple[LearnerState, dict[str, Array], Metrics]:
    """`update` from the whole batch's sums. `state` is donated."""
    loss, gradient, metrics = total
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
