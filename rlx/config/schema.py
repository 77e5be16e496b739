"""Every setting of a run as frozen dataclasses: the form in which the code reads them.

Defaults live in `configs/base.py`, the only place that has them, with units; a dataclass here says names, types and
meaning. `rlx.config.parse` turns an ml_collections ConfigDict into these, `rlx.config.checks` refuses contradictions.
Nothing here imports jax or ml_collections.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from rlx.config.chat import ChatConfig, ToolsConfig
from rlx.config.cluster import ClusterConfig
from rlx.config.frozen import CollapseConfig, FrozenConfig
from rlx.config.inference import AuditConfig, InferenceConfig
from rlx.config.objective import ObjectiveConfig
from rlx.config.planning import PlanConfig
from rlx.config.sandbox import SandboxConfig
from rlx.config.simulation import SimulateConfig
from rlx.types import RowShape

# The linear layers of all families of models by their names in a checkpoint, those of a dense block first.
LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("g_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    *("a_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    *("gate_up_proj", "routed_expert_down_proj", "routed_expert_up_proj"),
)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str
    directory: str
    seed: int
    resume: Literal["auto", "never", "must"]
    compilation_cache: str  # a directory, "" = none

    @property
    def path(self) -> Path:
        """The run's own directory."""
        return Path(self.directory) / self.name


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str  # a Hugging Face directory
    dtype: Literal["float32", "bfloat16"]  # of the weights in memory and of the matrix products
    remat: Literal["auto", "none", "products", "layer"]  # activation recomputation in the update
    scan_layers: Literal["auto", "on", "off"]  # the update's layers in a loop, or one after the other
    attention_block: int  # tokens whose attention scores exist at once, of queries and of keys; 0 = by the row's length
    balance_loss: float  # coefficient, mixtures of experts
    router_z_loss: float  # coefficient, mixtures of experts
    balance_packing: bool  # mixtures of experts: micro-batches that spread over experts, by the engine's choices
    replay_routes: bool  # mixtures of experts: train with the experts that the engine chose, where it says which


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685): W + (alpha / rank) B A. rank 0 trains every parameter instead."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names of linear layers, as in the checkpoint, and patterns: `rlx.models.lora.matches`
    experts: Literal["per_expert", "shared_outer"] = "per_expert"  # the form of routed experts' adapters


@dataclasses.dataclass(frozen=True)
class TaskSourceConfig:
    """Where tasks of one kind come from. One of `dataset` (a reasoning-gym name) and `path` (JSONL) is set."""

    dataset: str
    path: str
    options: dict[str, Any]  # reasoning-gym's own keys for this dataset
    size: int
    weight: float
    grader: str  # "" = the dataset's own
    environment: Literal["", "python_tool", "code", "web_project", "agent"] = ""  # "" = one question, one answer
    partial_credit: bool = False  # rewards between 0 and 1 where the grader has them
    agent: tuple[str, ...] = ()  # the command of environment "agent"


@dataclasses.dataclass(frozen=True)
class TasksConfig:
    sources: dict[str, TaskSourceConfig]
    seed: int
    held_out: int  # tasks kept for evaluation, over all sources in proportion to their weights
    train: int  # tasks trained on, 0 = all that are not held out
    split: str  # edge.json of `rlx edge`, whose tasks are trained on and held out; "" = held_out of all tasks
    system_prompt: str
    suffix: str  # appended to every question


@dataclasses.dataclass(frozen=True)
class GraderConfig:
    workers: int
    timeout_s: float
    extract: Literal["last_number", "tagged", "all"]


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    tasks_per_update: int
    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    head_size: int  # K of the sampler's top-K head, 0 = none
    truncated: Literal["score", "mask", "zero_reward"]
    filter_no_signal: bool
    no_signal_limit: int


@dataclasses.dataclass(frozen=True)
class ProducerConfig:
    """Generation beside training: how much is under way, how old it may be, and how engines get new weights."""

    max_policy_lag: int  # 0 = the synchronous loop
    publication: Literal["barrier", "refresh", "drain"]
    sessions_in_flight: int
    engine_admission: int  # 0 = the engine's slots
    http_admission: int  # 0 = 2 x admission
    max_concurrent_samples: int  # 0 = automatic
    session_token_limit: int  # 0 = none
    train_token_limit: int  # 0 = learner.row_tokens
    over_limit: Literal["drop", "cut"]
    sessions_beyond_training: bool  # session_token_limit may be above train_token_limit
    stale_tasks: Literal["return", "drop"]
    request_timeout_s: float
    environment_timeout_s: float
    load_timeout_s: float
    retries: int
    backoff_s: float
    outage_s: float
    failure_limit: int


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    kind: Literal["local", "sglang"]
    slots: int
    context: int
    prefill_buckets: tuple[int, ...]
    prefill_rows: int
    steps_per_dispatch: int
    lanes: int


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    updates: int
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    final_learning_rate_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    row_tokens: int
    row_targets: int
    micro_batch_rows: int
    prefix_sharing: bool
    row_samples: int  # 0 = parts lie anywhere in a row
    row_prefix: int  # tokens, before the samples'
    nonfinite_limit: int
    logprob_implementation: Literal["auto", "reference", "xla", "mosaic"]
    head_precision: Literal["auto", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32"]  # of the head's products

    @property
    def row_shape(self) -> RowShape | None:
        """Of the parts of a row, None = anywhere."""
        return RowShape(self.row_prefix, self.row_samples) if self.row_samples else None


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning, by `rlx sft` or as a cold start of `rlx train`. steps 0 = none."""

    steps: int
    path: str  # JSONL of {"question", "response"}
    learning_rate: float
    batch_size: int
    batch_rows: int
    validation_path: str
    validation_fraction: float
    eval_every: int
    save_every: int

    @property
    def validates(self) -> bool:
        return bool(self.validation_path or self.validation_fraction)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int
    attempts_per_task: int
    watch_nth: int  # saved versions between two that `rlx evaluate --watch` tests
    temperature: float
    k: tuple[int, ...]
    confidence: float


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    tensorboard: bool
    histograms_every: int
    samples_every: int
    samples_shown: int
    skip_updates: int  # the first updates hold compilation: left out of every rate


@dataclasses.dataclass(frozen=True)
class Config:
    run: RunConfig
    model: ModelConfig
    lora: LoraConfig
    tasks: TasksConfig
    chat: ChatConfig
    tools: ToolsConfig
    grader: GraderConfig
    sandbox: SandboxConfig
    rollout: RolloutConfig
    producer: ProducerConfig
    engine: EngineConfig
    inference: InferenceConfig
    audit: AuditConfig
    learner: LearnerConfig
    objective: ObjectiveConfig
    frozen: FrozenConfig
    collapse: CollapseConfig
    sft: SftConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    metrics: MetricsConfig
    cluster: ClusterConfig
    plan: PlanConfig
    simulate: SimulateConfig
