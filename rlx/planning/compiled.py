"""XLA's own account of an update's memory: its programs compiled for abstract arrays, nothing allocated.

The devices may be virtual ones of a CPU, whose compiler fuses and schedules in its own way: arguments and results are
the same everywhere, temporaries are not.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from rlx.assemble import step_config
from rlx.learner.state import LearnerState, make_optimizer, state_shardings
from rlx.learner.step import MicroBatch, StepConfig, add_slice, apply, slice_gradient
from rlx.models.description import Params, ParamSpec
from rlx.models.placed import placement_of, shardings, training
from rlx.models.spec import param_specs
from rlx.parallel.mesh import Placement
from rlx.planning import scoring
from rlx.planning.case import Case, batch_shapes, trained


class Account(NamedTuple):
    """Bytes on one device."""

    arguments: int
    outputs: int
    temporaries: int


class Accounts(NamedTuple):
    gradient: Account  # of the program that adds a micro-batch's gradient up
    apply: Account  # of the optimizer's


def accounts(case: Case) -> Accounts:
    """Compiles for the first `case.layout.devices` devices.

    Raises:
      LayoutError: where there are fewer, or where the model or batch do not allow the layout.
    """
    layout = case.checked().layout
    placement = placement_of(case.config.cluster, layout, case.rows)
    placement = training(placement, trained(case), case.arch)
    step = dataclasses.replace(
        step_config(case.config, case.arch, case.rows, placement),
        remat=case.remat,
        attention_block=case.attention_block(accelerator=placement.mesh.devices.flat[0].platform != "cpu"),
        unrolled=False,
        logprob_implementation="xla",
    )
    specs = trained(case)
    trainable, places = _placed(specs, case, placement, jnp.float32), shardings(specs, case.arch, placement)
    base = param_specs(case.arch) if case.config.lora.rank else {}
    frozen = _placed(base, case, placement, case.config.model.dtype) if base else {}
    batch = micro_batch(case, placement)
    whole = NamedSharding(placement.mesh, PartitionSpec())
    shapes = jax.eval_shape(partial(slice_gradient, step), trainable, frozen, batch)
    everywhere = partial(jax.tree.map, lambda x: _like(x, whole))
    total = (everywhere(shapes[0]), jax.tree.map(_like, shapes[1], places), everywhere(shapes[2]))
    adding = add_slice.lower(step, trainable, frozen, batch, total).compile()
    return Accounts(_account(adding), _applied(case, step, trainable, total, places, whole))


def _applied(
    case: Case, step: StepConfig, trainable: Params, total: PyTree, places: PyTree, whole: NamedSharding
) -> Account:
    optimizer = make_optimizer(case.config.learner)

    def fresh(trainable: Params) -> LearnerState:
        number = jnp.zeros((), jnp.int32)
        return LearnerState(number, number, number, trainable, optimizer.init(trainable))

    shapes = jax.eval_shape(fresh, trainable)
    state = jax.tree.map(_like, shapes, state_shardings(optimizer, places, trainable, whole))
    return _account(apply.lower(optimizer, state, total).compile())


def _account(compiled: jax.stages.Compiled) -> Account:
    said = compiled.memory_analysis()
    if said is None:
        raise RuntimeError(f"the backend {jax.default_backend()} does not say what memory a program takes")
    return Account(said.argument_size_in_bytes, said.output_size_in_bytes, said.temp_size_in_bytes)


def _placed(specs: Params, case: Case, placement: Placement, dtype: str) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.tree.map(
        lambda spec, where: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where),
        specs,
        shardings(specs, case.arch, placement),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )


def _like(x: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def micro_batch(case: Case, placement: Placement) -> MicroBatch:
    """As `rlx.assemble.device_batch` places it."""
    over_dp = NamedSharding(placement.mesh, PartitionSpec("dp"))
    whole = NamedSharding(placement.mesh, PartitionSpec())

    def one(dtype: str, sizes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=over_dp if sizes else whole)

    shapes = {name: one(*shape) for name, shape in batch_shapes(case).items()}
    scored: dict[str, Any] = {name: one(*shape) for name, shape in scoring.arrays(case).items()}
    absent: dict[str, Any] = dict.fromkeys(("head_ids", "head_logprobs", "routes"))
    return MicroBatch(**(absent | shapes), frozen=scored, row_shape=case.config.learner.row_shape)
