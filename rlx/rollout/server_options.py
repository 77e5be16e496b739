"""The configuration as SGLang servers and their clients take it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.profiles import profile
from rlx.config.schema import Config
from rlx.rollout.fleet import FleetOptions
from rlx.rollout.options import fleet_options
from rlx.rollout.servers import CPU_ARGUMENTS, ServerSpec, free_port
from rlx.rollout.sglang import SglangOptions
from rlx.rollout.sglang_http import Server
from rlx.rollout.sglang_requests import Limits

# SGLang keeps a few positions of a context for itself.
SPARE_POSITIONS = 16
# What a server calls its weights until the run has published some: no number, so nothing that it writes is taken.
UNPUBLISHED = "unpublished"
# Where only adapters are published, each under a name that a server started anew does not know.
BASE = "0"


def api_key(config: Config) -> str:
    """For generation; "" where none is asked for."""
    return _variable(config.inference.api_key_variable)


def admin_key(config: Config) -> str:
    """For weights, pauses and flushes."""
    return _variable(config.inference.admin_key_variable) or api_key(config)


def _variable(name: str) -> str:
    return os.environ[name] if name else ""


def server_specs(config: Config, logs: Path, *, attached: bool = True) -> list[ServerSpec]:
    """The servers that `config` starts on this machine; their logs are logs/engine-INDEX.log.

    Raises ConfigError for a model that they must not serve in this way.
    """
    inference = config.inference
    check_state(config)
    keys = {"RLX_API_KEY": api_key(config), "RLX_ADMIN_API_KEY": _variable(inference.admin_key_variable)}
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | {name: key for name, key in keys.items() if key}
    if inference.device == "cpu":
        # Servers that share a CPU and each take all of it slow each other down.
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // max(1, inference.count)))
        # Threads that wait for each other by spinning take the cores from whoever they wait for, and from the trainer.
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return [
        ServerSpec(
            python=str(Path(inference.python).absolute()),
            arguments=server_arguments(config, i),
            port=inference.first_port + i if inference.first_port else free_port(),
            log=logs / f"engine-{i}.log",
            host=inference.host,
            environment=environment,
            attached=attached,
        )
        for i in range(inference.count)
    ]


def server_arguments(config: Config, index: int) -> tuple[str, ...]:
    """Of sglang.launch_server for the server of this number on its machine; a later one of a name wins."""
    inference, whole = config.inference, profile(config)
    length = config.engine.context + SPARE_POSITIONS
    arguments = [
        f"--model-path={Path(config.model.path).absolute()}",
        *(CPU_ARGUMENTS if inference.device == "cpu" else ("--device=cuda",)),
        f"--dtype={config.model.dtype}",
        f"--context-length={length}",
        f"--max-running-requests={whole.admission}",
        f"--max-total-tokens={whole.admission * length}",
        f"--weight-version={BASE if inference.weights == 'adapter' else UNPUBLISHED}",
        "--log-level-http=warning",  # a line for every request would be most of the log
    ]
    if inference.device == "cuda":
        first = inference.first_gpu + index * inference.tensor_parallel
        arguments += [f"--tp-size={inference.tensor_parallel}", f"--base-gpu-id={first}"]
    if inference.memory_fraction:
        arguments.append(f"--mem-fraction-static={inference.memory_fraction}")
    if inference.attention_backend:
        arguments.append(f"--attention-backend={inference.attention_backend}")
    if not whole.radix_cache:
        arguments.append("--disable-radix-cache")
    if is_hybrid(config):
        arguments.append(f"--mamba-ssm-dtype={inference.state_dtype}")
    if inference.fp32_head:
        arguments.append("--enable-fp32-lm-head")
    if inference.weights == "adapter":
        arguments += ["--enable-lora", f"--max-lora-rank={inference.max_lora_rank}"]
        arguments += [f"--max-loras-per-batch={inference.max_loras}", "--lora-target-modules", *config.lora.targets]
        arguments += ["--lora-backend=torch_native"] if inference.device == "cpu" else []
    return (*arguments, *inference.arguments)


def model_settings(config: Config) -> dict[str, Any]:
    """config.json of the model."""
    settings: dict[str, Any] = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    return settings


def is_hybrid(config: Config) -> bool:
    """Has the model layers of linear attention, whose state a prefix cache must keep?

    Families say so in three ways: by naming each layer's kind, by sizes of heads that only such layers have (which of
    the layers these are then follows from an interval), or in a section of its own.
    """
    settings = model_settings(config)
    text = settings.get("text_config", settings)
    named = "linear_attention" in (text.get("layer_types") or ())
    sized = "linear_num_value_heads" in text and text.get("layer_types") is None
    return named or sized or bool(text.get("linear_attn_config"))


def check_state(config: Config) -> None:
    """Raises ConfigError where a prefix cache would keep a rounded state of a hybrid model."""
    inference = config.inference
    if profile(config).radix_cache and inference.state_dtype != "float32" and is_hybrid(config):
        raise ConfigError(
            f"config.inference.state_dtype = {inference.state_dtype!r}: with a radix cache the state of the linear "
            "attention of this model is kept between requests, and rounding it changes what follows; set 'float32', "
            "or config.inference.radix_cache to 'off'"
        )


def client(config: Config, url: str) -> Server:
    """One server, as it is spoken to."""
    return Server(url, api_key=api_key(config), admin_key=admin_key(config))


def engine_options(config: Config, vocab_size: int, head_size: int, stop_ids: tuple[int, ...]) -> SglangOptions:
    whole = profile(config)
    return SglangOptions(
        limits=Limits(vocab_size, config.engine.context, head_size, stop_ids),
        admission=whole.admission,
        request_timeout_s=config.producer.request_timeout_s,
        in_flight=whole.http_admission,
    )


def server_fleet_options(config: Config) -> FleetOptions:
    return dataclasses.replace(fleet_options(config), http_admission=profile(config).http_admission)
