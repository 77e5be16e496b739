"""SGLang servers as a run's engines: where they are or how they are started, and how weights come to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlx.config.schema import Config


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


@dataclasses.dataclass(frozen=True)
class Profile:
    """What belongs together for one kind of machine."""

    admission: int  # requests that an engine runs at once
    http_admission: int  # sent to it and not yet answered
    radix_cache: bool


PROFILES = {
    "generic": Profile(64, 128, radix_cache=False),
    "colocated": Profile(64, 128, radix_cache=False),
    "olmo_h100": Profile(512, 512, radix_cache=False),
    "olmo35_b300": Profile(512, 512, radix_cache=True),
}


def profile(config: Config) -> Profile:
    """What the engines of `config` really get: its profile, with the keys of `generic` that were changed."""
    producer, inference = config.producer, config.inference
    given = PROFILES[inference.profile]
    admission = producer.engine_admission or given.admission
    http = producer.http_admission or (given.http_admission if admission == given.admission else 2 * admission)
    radix = given.radix_cache if inference.radix_cache == "auto" else inference.radix_cache == "on"
    return Profile(admission, http, radix)


def admission(config: Config) -> int:
    """Requests that one engine of the run works on at once."""
    return profile(config).admission if config.engine.kind == "sglang" else config.engine.slots
