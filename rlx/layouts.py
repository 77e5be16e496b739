"""A layout against one device: the same batch, loss, gradients and update, tensor by tensor.

Weights are random at the model's own architecture, all of them different, LoRA's factors too, which a fresh adapter
leaves at zero; the batch is drawn and packed as a run packs it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from rlx.assemble import device_batch, step_config
from rlx.config.errors import ConfigError, said
from rlx.config.schema import Config
from rlx.data.packing import FrozenArray, PackingConfig, Trajectory, pack
from rlx.learner.state import LearnerState, make_optimizer
from rlx.learner.step import MicroBatch, StepConfig, Total, apply, slice_gradient
from rlx.models.description import Architecture, Params, ParamSpec
from rlx.models.lora import adapter_scale, adapter_specs
from rlx.models.placed import place, placement_of, sizes_of, training
from rlx.models.spec import param_specs
from rlx.models.transformer import prefix_sharing_unsupported_reason
from rlx.parallel.layout import Layout, check, row_parts
from rlx.parallel.mesh import Placement
from rlx.planning import scoring
from rlx.planning.case import case_of
from rlx.types import RowShape, TopK

ROW_TOKENS = 64  # of a row of the batch, or the next multiple that context parallelism needs
MICRO_BATCHES = 4  # of a pipeline, at least
SEED = 0
MOVED = 3  # further roundings of one device in float32
# A program that runs once on little is compiled without optimizing its machine code: a third less to wait for.
ONCE = {"xla_backend_optimization_level": 0}


class TensorError(NamedTuple):
    """Of a gradient, or of what an update changed: ‖difference‖ / ‖one device's‖."""

    name: str
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    layout: Layout
    loss_error: float  # |difference| / mean |token loss|
    gradients: tuple[TensorError, ...]
    changes: tuple[TensorError, ...]  # of one update

    @property
    def worst(self) -> TensorError:
        # NaN is worst of all.
        return max(self.gradients, key=lambda each: (each.error != each.error, each.error))


class Outcome(NamedTuple):
    """What one device, or all of a layout, made of the batch."""

    loss: float
    gradient: dict[str, np.ndarray]
    change: dict[str, np.ndarray]
    token_loss: float  # mean |weighted loss of a token|


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch, and weights to compute it with."""

    config: StepConfig
    learner: Config
    trainable: Params
    trainable_specs: Params
    frozen: Params
    frozen_specs: Params
    batch: MicroBatch


def compare(config: Config, arch: Architecture, layout: Layout, dtype: str) -> tuple[Comparison, Comparison | None]:
    """(the layout against one device, in float32 also one device's float32 against its float64).

    The latter is the largest of several roundings: in a deep model one of them says little of the next.

    Raises:
      LayoutError: where the model, or a batch, does not allow the layout.
    """
    cluster = config.cluster
    rows, tokens = batch_shape(layout, cluster.pipeline_rounds, cluster.sequence_parallel)
    check(layout, sizes_of(arch, tokens, rows, config))
    case = make_case(config, arch, rows, tokens, dtype)
    single = run(case, None)
    spread = difference(layout, single, run(case, placement_of(cluster, layout, rows)))
    if dtype == "float64":
        return spread, None
    exact = run(make_case(config, arch, rows, tokens, "float64"), None)
    others = [run(moved(case, seed), None) for seed in range(MOVED)]
    return spread, largest([difference(Layout(), exact, other) for other in (single, *others)])


def moved(case: Case, seed: int) -> Case:
    """With weights that are one unit in the last place up or down: another rounding of the same model."""
    random = np.random.default_rng(seed)

    def move(x: Array) -> Array:
        return jnp.asarray(np.nextafter(x, np.asarray(random.choice((-np.inf, np.inf), x.shape), x.dtype)))

    return dataclasses.replace(
        case, trainable=jax.tree.map(move, case.trainable), frozen=jax.tree.map(move, case.frozen)
    )


def largest(found: Sequence[Comparison]) -> Comparison:
    """The largest difference of each tensor, and of the loss."""
    tensors = lambda rows: tuple(max(row, key=lambda each: each.error) for row in zip(*rows, strict=True))  # noqa: E731
    return Comparison(
        found[0].layout,
        max(each.loss_error for each in found),
        tensors([each.gradients for each in found]),
        tensors([each.changes for each in found]),
    )


def batch_shape(layout: Layout, rounds: int, over_tp: bool) -> tuple[int, int]:
    """(rows, tokens a row) that the layout divides."""
    parts = math.lcm(2, row_parts(layout, over_tp))
    group = layout.pp if rounds > 1 else 1  # goes round together
    rows = -(-MICRO_BATCHES // group) * group if layout.pp > 1 else 2
    return layout.dp * rows, -(-ROW_TOKENS // parts) * parts


def make_case(config: Config, arch: Architecture, rows: int, tokens: int, dtype: str) -> Case:
    """The same numbers in any dtype: they are drawn in float32."""
    base, low_rank = param_specs(arch), adapter_specs(arch, config.lora) if config.lora.rank else {}
    params = drawn(base, SEED, dtype, depth=arch.num_layers)
    # An adapter's product is half as large as what it is added to.
    gain = (0.5 / adapter_scale(config.lora)) ** 0.5 if low_rank else 1.0
    adapter = drawn(low_rank, SEED + 1, dtype, depth=arch.num_layers, gain=gain)
    step = dataclasses.replace(
        step_config(config, arch, 2 * rows), dtype=dtype, head_precision=None, logprob_implementation="xla"
    )
    share = config.learner.prefix_sharing and prefix_sharing_unsupported_reason(arch) is None
    shape = None
    if config.learner.row_shape is not None:
        if not share:
            why = "a model or a recipe that does not share prompts has no such rows; set it to 0"
            raise ConfigError(said("learner.row_samples", config.learner.row_samples, why))
        shape = RowShape(tokens // 4 + (tokens - tokens // 4) % 2, 2)  # for the pair that a row holds
    batch = drawn_batch(arch, rows, tokens, config.rollout.head_size, share, frozen_arrays(config, arch), shape)
    if dtype == "float64":  # what the sampler recorded too: a sum of float32 depends on how a program is cut
        batch = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, batch)
    if config.lora.rank:
        return Case(step, config, adapter, low_rank, params, base, batch)
    return Case(step, config, params, base, {}, {}, batch)


def drawn(specs: Params, seed: int, dtype: str, *, depth: int, gain: float = 1.0) -> Params:
    """Random weights, times `gain`, that keep activations about 1; what initializes to 1 stays near it.

    Each of `depth` layers adds twice to the stream, and their sum stays about 1 too (as in GPT-2): where layers outgrow
    the stream, a deep random model is chaotic, and makes of one rounding a wrong digit of a gradient. For the same
    reason the stream begins at 1, but where the output head is the embedding.
    """
    random = np.random.default_rng(seed)
    untied = "head" in specs

    def draw(path: tuple[Any, ...], spec: ParamSpec) -> Array:
        noise = np.float32(gain) * random.standard_normal(spec.shape, np.float32)
        if spec.initializer == "ones":
            return jnp.asarray(1 + 0.1 * noise, dtype)
        if untied and path[0].key == "embed":
            return jnp.asarray(noise, dtype)
        inputs = 100 if len(spec.shape) == 1 else spec.shape[-1 if spec.axes[0] == "vocab" else -2]
        adds = spec.axes[0] == "layer" and len(spec.axes) > 2 and spec.axes[-1] == "embed"
        return jnp.asarray(noise * np.float32((min(inputs, 400) * (2 * depth if adds else 1)) ** -0.5), dtype)

    return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def frozen_arrays(config: Config, arch: Architecture) -> tuple[FrozenArray, ...]:
    """What frozen policies would give the batch: a reference, teachers or signals."""
    most = arch.vocab_size if config.objective.distill.form == "full" else _candidates(config.rollout.head_size, arch)
    return tuple(
        FrozenArray(name, min(sizes[2], most) if sizes[2:] else 0, dtype)
        for name, (dtype, sizes) in scoring.arrays(case_of(config, arch)).items()
    )


def _candidates(head_size: int, arch: Architecture) -> int:
    return min(head_size, arch.vocab_size // 2)


def drawn_batch(
    arch: Architecture,
    rows: int,
    tokens: int,
    head_size: int,
    share: bool,
    frozen: tuple[FrozenArray, ...] = (),
    shape: RowShape | None = None,
) -> MicroBatch:
    """Two sequences a row, which begin alike."""
    random, scored = np.random.default_rng(SEED), np.random.default_rng(SEED + 1)
    head = _candidates(head_size, arch)
    trajectories = [each for group in range(rows) for each in _pair(random, arch.vocab_size, group, tokens, head)]
    trajectories = [dataclasses.replace(t, frozen=_scores(scored, frozen, int(t.mask.sum()))) for t in trajectories]
    packed = pack(trajectories, PackingConfig(tokens, tokens, rows, 1, head, share, frozen=frozen, row_shape=shape))
    [batch] = device_batch(packed)
    return batch


def _scores(random: np.random.Generator, arrays: tuple[FrozenArray, ...], targets: int) -> dict[str, np.ndarray]:
    """Log-probs, differences of them, and an overlap, a share."""

    def draw(array: FrozenArray) -> np.ndarray:
        shape = (targets, array.candidates) if array.candidates else (targets,)
        if array.name == "overlap":
            return random.uniform(0, 1, shape)
        return -random.uniform(1, 8, shape) if array.name.endswith("logprobs") else random.normal(0, 0.3, shape)

    return {array.name: draw(array).astype(array.dtype) for array in arrays}


def _pair(random: np.random.Generator, vocab: int, group: int, tokens: int, head: int) -> Iterator[Trajectory]:
    prompt = random.integers(vocab, size=tokens // 8)
    for advantage in (1.0, -0.7):
        length = int(random.integers(tokens // 4, tokens // 2 - 2))
        ids = np.concatenate([prompt, random.integers(vocab, size=length - len(prompt))]).astype(np.int32)
        mask = np.arange(length) >= len(prompt)
        count = int(mask.sum())
        top = None
        if head:
            chosen = np.stack([random.permutation(vocab)[:head] for _ in range(count)]).astype(np.int32)
            top = TopK(chosen, -np.sort(random.uniform(1, 9, (count, head))).astype(np.float32))
        logprobs = np.where(mask, -random.uniform(1, 8, length), 0).astype(np.float32)
        yield Trajectory(ids, mask, advantage, logprobs, np.zeros(length, np.int32), top, group)


def run(case: Case, placement: Placement | None) -> Outcome:
    """Loss, gradient and one update."""
    trainable, frozen = jax.tree.map(jnp.copy, case.trainable), case.frozen  # the update's state is donated
    if placement is not None:
        placement = training(placement, case.trainable_specs, case.config.arch)
        trainable = place(trainable, case.trainable_specs, case.config.arch, placement)
        frozen = place(frozen, case.frozen_specs, case.config.arch, placement)
    step = dataclasses.replace(case.config, placement=placement)
    total = _program(step)(trainable, frozen, case.batch)
    optimizer = make_optimizer(case.learner.learner)
    version, skipped, in_row = (jnp.zeros((), jnp.int32) for _ in range(3))
    before = _numpy(trainable)
    gradient = _numpy(total[1])
    state = LearnerState(version, skipped, in_row, trainable, optimizer.init(trainable))
    state, _, _ = apply(optimizer, state, total)
    change = {name: new - before[name] for name, new in _numpy(state.trainable).items()}
    tokens = max(int(case.batch.mask.sum()), 1)
    scale = float(jnp.abs(case.batch.advantages * case.batch.mask).sum()) / tokens
    return Outcome(float(total[0]), gradient, change, scale)


@lru_cache(maxsize=4)  # another rounding of a model runs the program of the first
def _program(step: StepConfig) -> Callable[..., Total]:
    return jax.jit(partial(slice_gradient, step), compiler_options=ONCE)


def _numpy(tree: PyTree[Array]) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.array(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def difference(layout: Layout, one: Outcome, other: Outcome) -> Comparison:
    loss = abs(one.loss - other.loss) / one.token_loss
    return Comparison(layout, loss, _errors(one.gradient, other.gradient), _errors(one.change, other.change))


def _errors(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[TensorError, ...]:
    """A tensor whose norm is next to nothing is measured by the norm of all."""
    norms = {name: float(np.linalg.norm(x)) for name, x in one.items()}
    least = 1e-6 * float(np.sqrt(sum(norm**2 for norm in norms.values())))
    return tuple(
        TensorError(name, float(np.linalg.norm(one[name] - other[name])) / max(norms[name], least, 1e-300))
        for name in one
    )
