"""What the sections `inference` and `audit` must not say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from rlx.config.errors import said
from rlx.config.profiles import PROFILES
from rlx.config.schema import Config

POSITIVE = ("ready_timeout_s", "health_every_s", "health_timeout_s", "tensor_parallel", "max_loras", "bucket_mib")
# What SGLang takes adapters of.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOT_NEGATIVE = ("count", "first_port", "first_gpu", "max_lora_rank")
# What would change the engine or what it is sent, and what of it says nothing: the defaults of configs/base.py.
ONLY_SERVERS: dict[str, Any] = {
    "profile": "generic",
    "first_gpu": 0,
    "tensor_parallel": 1,
    "memory_fraction": 0.0,
    "attention_backend": "",
    "radix_cache": "auto",
    "state_dtype": "float32",
    "fp32_head": False,
    "arguments": (),
    "weights": "full",
    "transport": "disk",
    "weights_directory": "",
}


def inference_problems(config: Config) -> list[str]:
    """A line for each problem, with its key, its value and the way out."""
    values = vars(config.inference)
    problems = [said(f"inference.{key}", values[key], "must be above 0") for key in POSITIVE if not values[key] > 0]
    problems += [said(f"inference.{key}", values[key], "must be 0 or more") for key in NOT_NEGATIVE if values[key] < 0]
    if config.audit.every < 0:
        problems.append(said("audit.every", config.audit.every, "must be 0 (never) or more publications"))
    if config.engine.kind == "sglang":
        parts = (_servers, _addresses, _keys, _memory, _profile, _weights, _head, _routes)
        return problems + [problem for part in parts for problem in part(config)]
    return problems + list(_unused(config))


def _unused(config: Config) -> Iterator[str]:
    """What only servers have."""
    inference, way_out = config.inference, "the embedded engine has no use for it; set config.engine.kind to 'sglang'"
    if inference.addresses or inference.router:
        yield said("inference.addresses", inference.addresses, way_out)
    if inference.count:
        yield said("inference.count", inference.count, way_out)
    for key, unset in ONLY_SERVERS.items():
        if (value := getattr(inference, key)) != unset:
            yield said(f"inference.{key}", value, f"{way_out}, or this to {unset!r}")
    if config.audit.at_start or config.audit.every:
        given = (config.audit.at_start, config.audit.every)
        yield f"config.audit.at_start, config.audit.every = {given}: {way_out}, or these to False and 0"


def _servers(config: Config) -> Iterator[str]:
    inference = config.inference
    if inference.addresses and inference.count:
        why = f"config.inference.count = {inference.count} would start others; set one of the two to () or 0"
        yield said("inference.addresses", inference.addresses, why)
    if not inference.addresses and not inference.count:
        why = "names no server; set config.inference.count to start some here, or this to ('http://HOST:PORT', ...)"
        yield said("inference.addresses", (), why)
    if inference.router and not inference.addresses:
        why = "stands before servers that run: name them all in config.inference.addresses, weights go to each"
        yield said("inference.router", inference.router, why)
    last = inference.first_port + inference.count - 1
    if inference.first_port and not (inference.first_port >= 1024 and last <= 65535):
        why = f"ports up to {last}: they must be in [1024, 65535], or 0 for any free ones"
        yield said("inference.first_port", inference.first_port, why)
    if inference.addresses and inference.first_gpu:
        why = "servers that are given have their GPUs; it is for those started here, set 0"
        yield said("inference.first_gpu", inference.first_gpu, why)


def _addresses(config: Config) -> Iterator[str]:
    inference = config.inference
    named = [*inference.addresses, *([inference.router] if inference.router else [])]
    for address in named:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            yield said("inference.addresses", address, "is no address of a server, as http://HOST:PORT is")
    repeated = sorted({a for a in named if named.count(a) > 1})
    if repeated:
        yield said("inference.addresses", repeated, "named twice: an engine has one name")


def _keys(config: Config) -> Iterator[str]:
    for name in ("api_key_variable", "admin_key_variable"):
        variable = getattr(config.inference, name)
        if variable and not os.environ.get(variable):
            why = "no such variable in the environment, or an empty one; export it, or set this to ''"
            yield said(f"inference.{name}", variable, why)


def _memory(config: Config) -> Iterator[str]:
    inference = config.inference
    if not 0 <= inference.memory_fraction < 1:
        yield said("inference.memory_fraction", inference.memory_fraction, "must be in (0, 1), or 0 for SGLang's own")
    if inference.profile == "colocated" and not inference.memory_fraction:
        why = "an engine on the trainer's own GPU must leave it memory; set the engine's share, e.g. 0.4"
        yield said("inference.memory_fraction", inference.memory_fraction, why)
    if inference.device == "cpu" and inference.tensor_parallel > 1:
        yield said("inference.tensor_parallel", inference.tensor_parallel, "a CPU is one device; set 1")


def _profile(config: Config) -> Iterator[str]:
    """A profile is measured as a whole."""
    name, producer, inference = config.inference.profile, config.producer, config.inference
    if name == "generic":
        return
    whole, way_out = PROFILES[name], "set config.inference.profile to 'generic' to choose for yourself"
    for key, unset, belongs in (
        ("engine_admission", 0, whole.admission),
        ("http_admission", 0, whole.http_admission),
    ):
        value = getattr(producer, key)
        if value not in (unset, belongs):
            yield said(f"producer.{key}", value, f"the profile {name!r} has {belongs}; set {unset}, or {way_out}")
    cached = "on" if whole.radix_cache else "off"
    if inference.radix_cache not in ("auto", cached):
        why = f"the profile {name!r} has {cached!r}; set 'auto', or {way_out}"
        yield said("inference.radix_cache", inference.radix_cache, why)


def _weights(config: Config) -> Iterator[str]:
    inference, lora = config.inference, config.lora
    if inference.weights == "adapter":
        if not lora.rank:
            why = "config.lora.rank = 0 trains every parameter, there is no adapter to send; set 'full'"
            yield said("inference.weights", "adapter", why)
        if lora.rank > inference.max_lora_rank:
            why = f"engines keep room for less than config.lora.rank = {lora.rank}; set at least that"
            yield said("inference.max_lora_rank", inference.max_lora_rank, why)
        if inference.transport == "distributed":
            why = "SGLang takes adapters from disk or in a request; set 'disk' or 'tensor'"
            yield said("inference.transport", "distributed", why)
        if config.audit.at_start:
            yield said("audit.at_start", True, "resets the base weights, which no adapter brings back; set False")
        patterns = [name for name in lora.targets if name not in ADAPTED]
        if patterns:
            why = f"engines take adapters of {', '.join(ADAPTED)}; name these, or set inference.weights to 'full'"
            yield said("lora.targets", patterns, why)
        if inference.max_loras < 2:
            why = "the next version is loaded while requests of the last one end; set at least 2"
            yield said("inference.max_loras", inference.max_loras, why)
        if inference.router:
            why = "requests name the adapter that a router's other servers may not have yet; set 'full'"
            yield said("inference.weights", "adapter", why)
    over_nccl = inference.transport == "distributed" and inference.distributed_backend == "nccl"
    if over_nccl and inference.device == "cpu" and not inference.addresses:
        yield said("inference.distributed_backend", "nccl", "needs GPUs; set 'gloo'")


def _head(config: Config) -> Iterator[str]:
    """Trainer and engine compute the head alike, or their log-probs differ for no reason of the policy's."""
    if config.inference.fp32_head and config.learner.head_precision == "bfloat16":
        why = "the trainer's head would be another; set config.learner.head_precision to 'auto' or 'float32'"
        yield said("inference.fp32_head", True, why)


def _routes(config: Config) -> Iterator[str]:
    if config.model.replay_routes:
        why = "answers of SGLang do not name the experts it chose; set False, or config.engine.kind to 'local'"
        yield said("model.replay_routes", True, why)
