"""From a configuration to the parts of a run: model, tokenizer, engine, compiled shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from rlx.config.chat_checks import several_turns
from rlx.config.errors import ConfigError
from rlx.config.schema import Config, LoraConfig
from rlx.data.packing import PackedBatch, PackingConfig
from rlx.data.pipeline import TaskStream, digest
from rlx.envs.chat import ChatTokenizer, load_chat_tokenizer
from rlx.learner.routing import RouterLosses
from rlx.learner.state import LearnerState, init_state, make_optimizer, state_shardings
from rlx.learner.step import Batch, MicroBatch, StepConfig
from rlx.models import files, hf
from rlx.models.blockwise import default_block
from rlx.models.lora import adapter_scale, adapter_specs, kernels, merged_kernels, replaced
from rlx.models.placed import placement_of, shardings, sizes_of, training
from rlx.models.sampler import routes_shape
from rlx.models.sharded import load_sharded
from rlx.models.spec import Architecture, Params, ParamSpec, param_specs
from rlx.models.transformer import Remat, kept_bytes, prefix_sharing_unsupported_reason
from rlx.parallel.gather import Gather
from rlx.parallel.layout import Layout, LayoutError, check, parse_layout
from rlx.parallel.mesh import Placement
from rlx.rollout.collect import Sampling
from rlx.rollout.lanes import LaneEngine, lane_config
from rlx.rollout.local import FirstDispatch, LocalEngine, served
from rlx.types import RowShape, Task

# Under model.scan_layers = "auto" the most layers that the update's program holds one after the other.
UNROLLED_LAYERS = 8
# Under model.remat = "auto" the most bytes that matrix products of a micro-batch may take between the two passes.
KEPT_BYTES = 2 << 30


def _as_it_is(params: Params) -> Params:
    return params


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint in memory, with its tokenizer. `params` are frozen where LoRA is trained."""

    arch: Architecture
    params: Params
    tokenizer: ChatTokenizer
    fingerprint: str  # of its files: what a checkpoint of its adapter belongs to
    placement: Placement | None = None  # of `params` and what is trained, None = one device
    gather: Callable[[Params], Params] = _as_it_is  # from there to where engines and files take it from


def load_model(config: Config, *, on_mesh: bool = False) -> Model:
    """The model on one device, or as cluster.trainer_layout has it.

    Raises ValueError or OSError for files that are missing, unsupported or do not fit each other; ConfigError for a
    layout that the model, the rows of a micro-batch or the devices that are there do not allow.
    """
    path, context = config.model.path, config.engine.context
    arch = hf.read_architecture(path)
    if context > arch.max_positions:
        raise ConfigError(
            f"config.engine.context = {context}: the model in {path} was made for {arch.max_positions} positions "
            f"(max_position_embeddings in its config.json); set at most {arch.max_positions}"
        )
    if config.model.replay_routes and not arch.expert_layers:
        raise ConfigError(
            f"config.model.replay_routes = True: the model in {path} ({arch.model_type}) has no experts to choose; "
            "set it to False"
        )
    reason = prefix_sharing_unsupported_reason(arch)
    if config.learner.prefix_sharing and reason:
        raise ConfigError(
            f"config.learner.prefix_sharing = True: the model in {path} cannot, {reason}; set it to False"
        )
    if head_size(config) > arch.vocab_size:
        raise ConfigError(
            f"config.rollout.head_size = {config.rollout.head_size}: the model in {path} has {arch.vocab_size} tokens; "
            "set at most that"
        )
    tokenizer = load_chat_tokenizer(path, config.tasks.system_prompt, config.tasks.suffix, config.chat)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model's embedding {arch.vocab_size} "
            "(vocab_size in config.json): they are of different models"
        )
    placement = trainer_placement(config, arch) if on_mesh else None
    params = load_params(config, arch, placement)
    gather = _as_it_is if placement is None else _gather(config, placement, params)
    return Model(arch, params, tokenizer, files.fingerprint(path), placement, gather)


def load_params(config: Config, arch: Architecture, placement: Placement | None) -> Params:
    """Those of `config.model`, on one device or on a mesh. Raises ValueError or OSError."""
    path, dtype = config.model.path, config.model.dtype
    if placement is None:
        return jax.device_put(hf.load_params(path, arch, dtype))
    return load_sharded(path, arch, dtype, shardings(param_specs(arch), arch, placement))


def _gather(config: Config, placement: Placement, params: Params) -> Callable[[Params], Params]:
    """An engine in this process has one device. What goes to servers, or from one process to files, need not be
    gathered: it leaves the mesh tensor by tensor."""
    lasting = params if config.lora.rank else {}
    if jax.process_index():
        return Gather(placement, lasting, "nowhere")
    if config.engine.kind == "local":
        return Gather(placement, lasting, "device")
    return Gather(placement, lasting, "host") if jax.process_count() > 1 else _as_it_is


def trained_specs(config: Config, arch: Architecture) -> Params:
    """Of what the optimizer moves."""
    return adapter_specs(arch, config.lora) if config.lora.rank else param_specs(arch)


def trainer_placement(config: Config, arch: Architecture) -> Placement | None:
    """The mesh of cluster.trainer_layout; None for one device.

    Raises ConfigError where it cannot be, with the layouts nearest to it that can.
    """
    text, learner = config.cluster.trainer_layout, config.learner
    try:
        layout = parse_layout(text) if text else Layout()
        check(layout, sizes_of(arch, learner.row_tokens, learner.micro_batch_rows, config))
        if layout.devices == 1 and jax.process_count() == 1:
            return None
        placement = placement_of(config.cluster, layout, learner.micro_batch_rows)
        if jax.process_count() > 1 and layout.devices != jax.device_count():
            raise LayoutError(
                f"the processes have {jax.device_count()} devices together, {layout} is for {layout.devices}"
            )
    except LayoutError as error:
        raise ConfigError(f"config.cluster.trainer_layout = {text!r}: {error}") from error
    if layout.pp > 1 and config.model.replay_routes:
        raise ConfigError(
            f"config.model.replay_routes = True: a pipeline, PP{layout.pp} of config.cluster.trainer_layout, cannot "
            "replay an engine's choices; set it to False or PP to 1"
        )
    return training(placement, trained_specs(config, arch), arch)


@partial(jax.jit, static_argnums=2)
def _merged(params: Params, adapter: Params, scale: float) -> dict[tuple[str, ...], jax.Array]:
    return merged_kernels(params, adapter, scale)


# One program: leaf by leaf a copy compiles for each shape.
@partial(jax.jit, static_argnums=1)
def _copied(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)


def policy_params(config: Config, model: Model, trainable: Params) -> Params:
    """The parameters that an engine serves: the adapter merged in, in the model's dtype; where the model's are."""
    if config.lora.rank:
        touched = traverse_util.unflatten_dict(kernels(model.params, trainable))
        return replaced(model.params, _merged(touched, trainable, adapter_scale(config.lora)))
    return _copied(trainable, config.model.dtype)


def task_stream(config: Config, tasks: Sequence[Task]) -> TaskStream:
    weights = {name: source.weight for name, source in config.tasks.sources.items()}
    return TaskStream(tasks, weights, config.tasks.seed)


def fresh_state(config: Config, model: Model) -> LearnerState:
    """The learner's state before its first update."""
    key = jax.random.key(config.run.seed)
    optimizer = make_optimizer(config.learner)
    given = (model.arch, config.lora, optimizer)
    if model.placement is None:
        return _fresh_state(*given, model.params, key)
    placed = jax.jit(init_state, static_argnums=(0, 1, 3), out_shardings=state_places(config, model, optimizer))
    return placed(model.arch, config.lora, model.params, optimizer, key)


def fresh_optimizer(
    config: Config, model: Model, optimizer: optax.GradientTransformation, trainable: Params
) -> optax.OptState:
    """The optimizer's state before its first update, where it belongs."""
    if model.placement is None:
        return optimizer.init(trainable)
    return jax.jit(optimizer.init, out_shardings=state_places(config, model, optimizer).optimizer)(trainable)


def state_places(config: Config, model: Model, optimizer: optax.GradientTransformation) -> LearnerState:
    """Where a learner's state lies on the model's mesh."""
    assert model.placement is not None
    specs = trained_specs(config, model.arch)
    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs, is_leaf=lambda x: isinstance(x, ParamSpec)
    )
    whole = NamedSharding(model.placement.mesh, PartitionSpec())
    return state_shardings(optimizer, shardings(specs, model.arch, model.placement), shapes, whole)


# One program: piece by piece it compiles for a third of a second.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _fresh_state(
    arch: Architecture, lora: LoraConfig, optimizer: optax.GradientTransformation, params: Params, key: jax.Array
) -> LearnerState:
    return init_state(arch, lora, params, optimizer, key)


def check_belongs(
    config: Config, model: Model, held_out: Sequence[Task] | None, host: Mapping[str, Any], what: str
) -> None:
    """Raises ConfigError where the checkpoint whose host state this is was made with another model, or evaluated on
    other held-out tasks (None: they do not matter)."""
    if held_out is not None and host["held_out"] != digest(held_out):
        raise ConfigError(
            f"config.tasks.sources: the held-out tasks are not those of {what}, so its evaluations could not be "
            "compared; give the files that it began with, or another config.run.name"
        )
    if host["model"] != model.fingerprint:
        raise ConfigError(
            f"config.model.path = {config.model.path!r}: {what} was made with another model; give the one that it "
            "began with, or another config.run.name"
        )


def head_size(config: Config) -> int:
    """K of the sampler's top-K head, 0 where the objective has no use for it."""
    return config.rollout.head_size if config.objective.needs_head else 0


def make_engine(config: Config, model: Model, params: Params, version: int) -> LocalEngine | LaneEngine:
    """The embedded engine of `config`. Raises ConfigError for several lanes on what is no CPU."""
    lanes = config.engine.lanes
    if lanes > 1 and (platform := jax.default_backend()) != "cpu":
        raise ConfigError(
            f"config.engine.lanes = {lanes}: lanes are for CPUs, and this engine is on a {platform}; set it to 1"
        )
    weights, first_dispatch = served(model.arch, params), FirstDispatch()

    def lane() -> LocalEngine:
        return LocalEngine(
            model.arch,
            lane_config(config.engine),
            weights,
            version=version,
            head_size=head_size(config),
            stop_ids=tuple(model.tokenizer.stop_token_ids),
            record_routes=config.model.replay_routes,
            first_dispatch=first_dispatch,
        )

    return lane() if lanes == 1 else LaneEngine([lane() for _ in range(lanes)])


def sampling(config: Config) -> Sampling:
    """Of training. Evaluation draws from another stream of seeds."""
    return Sampling(
        group_size=config.rollout.group_size,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        zero_reward_truncated=config.rollout.truncated == "zero_reward",
        seed=2 * config.run.seed,
        session_token_limit=config.producer.session_token_limit,
        environment_timeout_s=config.producer.environment_timeout_s,
        # Between two rounds a session holds its sandbox, and its grading may need another.
        sessions_at_once=config.sandbox.max_open // 2 if several_turns(config) else 0,
        gradings=config.grader.workers if several_turns(config) else 0,
        retries=config.producer.retries,
        backoff_s=config.producer.backoff_s,
    )


def eval_sampling(config: Config) -> Sampling:
    return dataclasses.replace(
        sampling(config),
        group_size=config.eval.attempts_per_task,
        temperature=config.eval.temperature,
        zero_reward_truncated=False,
        seed=2 * config.run.seed + 1,
    )


def step_config(
    config: Config, arch: Architecture, num_sequences: int, placement: Placement | None = None
) -> StepConfig:
    implementation = config.learner.logprob_implementation
    return StepConfig(
        arch=arch,
        objective=config.objective,
        adapter_scale=adapter_scale(config.lora) if config.lora.rank else None,
        temperature=config.rollout.temperature,
        remat=remat(config, arch),
        dtype=config.model.dtype,
        logprob_implementation=None if implementation == "auto" else implementation,
        num_sequences=num_sequences,
        head_precision=None if config.learner.head_precision == "auto" else config.learner.head_precision,
        unrolled=unrolled(config, arch),
        router_losses=RouterLosses(config.model.balance_loss, config.model.router_z_loss),
        placement=placement,
        attention_block=attention_block(config, placement),
    )


def shapes(config: Config, arch: Architecture, placement: Placement | None) -> tuple[StepConfig, PackingConfig]:
    """What an update of a run is compiled for."""
    samples = config.rollout.tasks_per_update * config.rollout.group_size
    step = step_config(config, arch, samples, placement)
    return step, packing_config(config, samples, head_size(config), replayed_routes(config, arch))


def attention_block(config: Config, placement: Placement | None) -> int:
    """Tokens whose attention scores exist at once in an update, 0 = all of a row's."""
    platform = jax.default_backend() if placement is None else placement.mesh.devices.flat[0].platform
    return config.model.attention_block or default_block(config.learner.row_tokens, accelerator=platform != "cpu")


def unrolled(config: Config, arch: Architecture) -> bool:
    """Whether the update's layers stand one after the other in its program; see `rlx.models.transformer.forward`."""
    chosen = config.model.scan_layers
    return arch.num_layers <= UNROLLED_LAYERS if chosen == "auto" else chosen == "off"


def remat(config: Config, arch: Architecture) -> Remat:
    """What the update recomputes; under model.remat = "auto" a function of the configuration alone, so that a resumed
    run computes what it did before."""
    if config.model.remat != "auto":
        return config.model.remat
    tokens = config.learner.row_tokens * config.learner.micro_batch_rows
    kept = tokens * kept_bytes(arch, jnp.dtype(config.model.dtype).itemsize)
    return "products" if kept <= KEPT_BYTES else "layer"


def replayed_routes(config: Config, arch: Architecture) -> tuple[int, int] | None:
    """(layers of experts, choices of each) where the engine's choices are trained with."""
    return routes_shape(arch) if config.model.replay_routes else None


def packing_config(
    config: Config, num_sequences: int, head: int, routes: tuple[int, int] | None = None
) -> PackingConfig:
    learner = config.learner
    return PackingConfig(
        row_tokens=learner.row_tokens,
        row_targets=learner.row_targets or learner.row_tokens,
        rows=learner.micro_batch_rows,
        capacity=-(-num_sequences // learner.micro_batch_rows),  # at worst each has a row of its own
        head_size=head,
        share_prefixes=learner.prefix_sharing,
        routes=routes,
        balance_experts=config.model.balance_packing and routes is not None,
        row_shape=learner.row_shape,
    )


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """Rows of a packed batch, for instance those of one process. first: of them. rows: of all of the batch."""

    arrays: Mapping[str, Any]  # [M, rows here, ...], by the names of `MicroBatch`
    counts: Mapping[str, np.int32]  # of all of the batch
    first: int
    rows: int
    row_shape: RowShape | None


def batch_rows(packed: PackedBatch, first: int, last: int) -> BatchRows:
    """Rows first to last - 1 of each micro-batch."""
    whole = ("num_targets", "num_sequences")
    # Each array of the batch has its twin of the same name, so a forgotten one fails here.
    names = [f.name for f in dataclasses.fields(MicroBatch) if f.name not in (*whole, "row_shape")]
    arrays = {name: jax.tree.map(lambda x: x[:, first:last], getattr(packed, name)) for name in names}
    counts = {name: np.int32(getattr(packed, name)) for name in whole}
    return BatchRows(arrays, counts, first, packed.tokens.shape[1], packed.row_shape)


def device_batch(packed: PackedBatch | BatchRows, placement: Placement | None = None) -> Batch:
    """The packed batch on the device, or on all of a mesh: rows over dp, each process giving its own devices theirs."""
    given = batch_rows(packed, 0, packed.tokens.shape[1]) if isinstance(packed, PackedBatch) else packed
    put: Callable[[Any], Any] = jax.device_put  # `jnp.asarray` compiles a program for every shape
    if placement is not None:
        put = partial(placement.spread, first=given.first, rows=given.rows)
    counts: dict[str, Any] = {name: put(count) for name, count in given.counts.items()}
    micro_batch = partial(MicroBatch, **counts, row_shape=given.row_shape)
    return [
        micro_batch(**{name: jax.tree.map(lambda x, i=i: put(x[i]), x) for name, x in given.arrays.items()})
        for i in range(len(given.arrays["tokens"]))
    ]
