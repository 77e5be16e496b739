"""The programs of an update and of the embedded engine, compiled in threads while the parts of a run are opened.

What they are compiled for are shapes. Those of a fresh run on one device follow from the configuration and the
description of the model, so that compiling begins before a tokenizer, weights or engines are loaded. Where a mesh or
frozen policies have a say it begins once they are there. The engine's wait for the lengths of prompts.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlx import assemble
from rlx.config.schema import Config
from rlx.data.packing import PackingConfig, pack
from rlx.learner.state import LearnerState, init_state, make_optimizer
from rlx.learner.step import MicroBatch, StepConfig, compile_update
from rlx.models import sampler
from rlx.models.prompts import rows_for
from rlx.models.sampler import SamplerConfig, Slots
from rlx.models.spec import Architecture, Params, ParamSpec, param_specs
from rlx.parallel.mesh import Placement
from rlx.rollout.lanes import lane_config
from rlx.rollout.local import empty_slots, no_admission, reached, sampler_config, width_for, widths


def padding(packing: PackingConfig, placement: Placement | None) -> MicroBatch:
    """Of a batch only the shapes count, and they are those of an empty one."""
    (empty,) = assemble.device_batch(pack([], packing), placement)
    return empty


def abstract_params(config: Config, arch: Architecture) -> Params:
    """The shapes of what `assemble.load_params` reads, on one device."""
    shape = lambda spec: jax.ShapeDtypeStruct(spec.shape, config.model.dtype)  # noqa: E731
    return jax.tree.map(shape, param_specs(arch), is_leaf=lambda x: isinstance(x, ParamSpec))


def abstract_state(config: Config, arch: Architecture) -> LearnerState:
    """The shapes of `assemble.fresh_state`, on one device."""
    optimizer = make_optimizer(config.learner)
    made = partial(init_state, arch, config.lora, optimizer=optimizer, key=jax.random.key(config.run.seed))
    return jax.eval_shape(made, abstract_params(config, arch))


class Signature(NamedTuple):
    """What tells two programs of an update apart."""

    step: StepConfig
    optimizer: int  # its identity
    tree: Any  # of the arrays
    leaves: tuple[tuple[Any, ...], ...]


def signature(
    step: StepConfig, optimizer: optax.GradientTransformation, state: LearnerState, frozen: Params, batch: MicroBatch
) -> Signature:
    leaves, tree = jax.tree.flatten((state, frozen, batch))
    # A program is of arrays that were bound to their devices, or of such that were not.
    bound = lambda x: x.sharding if isinstance(x, jax.Array) and x.committed else None  # noqa: E731
    return Signature(step, id(optimizer), tree, tuple((x.shape, x.dtype, x.weak_type, bound(x)) for x in leaves))


class Compiler:
    """Of a run on `placement`. The update's compilation begins at once where its shapes are known.

    A context manager. Leaving it drops what has not begun and waits for nothing. The process ends when the program that
    a thread is at is compiled: XLA cannot be stopped, and an interpreter that ends beneath it is aborted, exit code and
    all.
    """

    def __init__(self, config: Config, arch: Architecture, placement: Placement | None):
        self._config, self._arch, self._placement = config, arch, placement
        self._threads = ThreadPoolExecutor(2, "compiler")
        self._early: Future[Signature] | None = None
        self._update: Future[None] | None = None
        self._engine: list[Future[None]] = []
        distilled = config.objective.distill.form != "off" or config.objective.needs_reference
        if placement is None and not distilled:
            # Made here: programs know it by its identity, and two threads that ask first at once get one each.
            optimizer = make_optimizer(config.learner)
            self._early = self._threads.submit(_compile_fresh, config, arch, optimizer)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def update(
        self,
        step: StepConfig,
        optimizer: optax.GradientTransformation,
        state: LearnerState,
        frozen: Params,
        packing: PackingConfig,
    ) -> Future[None]:
        """Done when the update is compiled, for these and not for what was expected of them."""
        given = (step, optimizer, state, frozen, padding(packing, self._placement))
        wanted = signature(*given)
        self._update = self._threads.submit(_compile_update, self._early, wanted, given)
        return self._update

    def begin_engine(self, prompts: Collection[int]) -> None:
        """Compile what a collection begins with in the embedded engine. prompts: lengths of all tasks', tokens."""
        if self._config.engine.kind == "local" and self._placement is None:
            shapes = _engine_shapes(self._config, self._arch, max(prompts))
            programs = (_compile_decode, _compile_prompts)
            self._engine = [self._threads.submit(program, self._arch, shapes) for program in programs]

    def wait_for_engine(self) -> None:
        """An engine that needs a program meanwhile would compile it once more.

        Raises what is known by now to keep a program from being compiled, the update's too: it must cost no evaluation.
        """
        for programs in self._engine:
            programs.result()
        if self._update is not None and self._update.done():
            self._update.result()


def _compile_fresh(config: Config, arch: Architecture, optimizer: optax.GradientTransformation) -> Signature:
    step, packing = assemble.shapes(config, arch, None)
    frozen = abstract_params(config, arch) if config.lora.rank else {}
    given = (step, optimizer, abstract_state(config, arch), frozen, padding(packing, None))
    compile_update(*given)
    return signature(*given)


def _compile_update(early: Future[Signature] | None, wanted: Signature, given: tuple[Any, ...]) -> None:
    if early is None or early.result() != wanted:
        compile_update(*given)


class EngineShapes(NamedTuple):
    """What programs of `rlx.models.sampler` are compiled for."""

    config: SamplerConfig
    params: Params
    slots: Slots
    bucket: int  # of prompts
    rows: int  # prompts of a prefill
    stretches: int


def _engine_shapes(config: Config, arch: Architecture, longest: int) -> EngineShapes:
    own = sampler_config(config.engine, assemble.head_size(config), config.model.replay_routes)
    lane = lane_config(config.engine)
    prompts = -(-config.rollout.tasks_per_update // config.engine.lanes)  # the first lane's, the most of all
    width = width_for(widths(lane.slots), prompts * config.rollout.group_size)
    params = jax.eval_shape(partial(sampler.unstack_layers, arch), abstract_params(config, arch))
    return EngineShapes(
        own,
        params,
        jax.eval_shape(partial(sampler.init_slots, arch, own.ends, width, params["embed"].dtype)),
        bucket=next(end for end in own.ends if end >= longest),
        rows=rows_for(config.engine.prefill_rows, prompts),
        stretches=reached(own.ends, longest),
    )


def _compile_decode(arch: Architecture, shapes: EngineShapes) -> None:
    until_free, stops = jax.ShapeDtypeStruct((), bool), sampler.stop_array(())
    given = (arch, shapes.config, shapes.stretches, shapes.params, shapes.slots)
    sampler.decode.lower(*given, until_free, jax.ShapeDtypeStruct(stops.shape, stops.dtype)).compile()


def _compile_prompts(arch: Architecture, shapes: EngineShapes) -> None:
    tokens = jax.ShapeDtypeStruct((shapes.rows, shapes.bucket), jnp.int32)
    given = (arch, shapes.params, tokens, jax.ShapeDtypeStruct((shapes.rows,), jnp.int32))
    sampler.prefill.lower(*given).compile()
    prompts = jax.eval_shape(partial(sampler.prefill, arch), *given[1:])
    width = len(shapes.slots.token)
    empty_slots.lower(arch, shapes.config.ends, width, shapes.params["embed"].dtype).compile()
    sampler.admit.lower(arch, shapes.slots, prompts, no_admission(width)).compile()
