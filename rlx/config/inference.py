"""SGLang servers as a run's engines: where they are or how they are started, and how weights come to them."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class InferenceConfig:
    profile: Literal["generic", "colocated", "olmo_h100", "olmo35_b300"]
    # --- which servers
    addresses: tuple[str, ...]  # of servers that run; () = started here
    router: str  # in front of them, "" = none; requests go to it, weights to each address
    count: int  # started here
    host: str
    first_port: int  # 0 = free ones
    python: str
    api_key_variable: str
    admin_key_variable: str
    ready_timeout_s: float
    health_every_s: float
    health_timeout_s: float
    # --- what a server that is started here is told
    device: Literal["cuda", "cpu"]
    first_gpu: int
    tensor_parallel: int
    memory_fraction: float
    attention_backend: str
    radix_cache: Literal["auto", "on", "off"]
    state_dtype: Literal["float32", "bfloat16"]
    fp32_head: bool
    max_lora_rank: int
    max_loras: int
    arguments: tuple[str, ...]
    # --- how weights come to it
    weights: Literal["full", "adapter"]
    transport: Literal["disk", "tensor", "distributed"]
    weights_directory: str
    bucket_mib: int
    distributed_backend: Literal["nccl", "gloo"]


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """Does an engine serve what was published? `rlx audit` asks the same on demand."""

    at_start: bool
    every: int  # publications
