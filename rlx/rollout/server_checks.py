"""Was a server started for what the run asks of it? Compared with what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.profiles import profile
from rlx.config.schema import Config
from rlx.rollout.server_options import is_hybrid, model_settings
from rlx.rollout.sglang import Served


def check_server(config: Config, name: str, served: Served, *, given: bool) -> None:
    """given: it was not started by `config`, so what `config` says of servers may not hold.

    Raises ConfigError with all that does not fit.
    """
    problems = [*_model(config, name, served), *(_settings(config, name, served.settings) if given else ())]
    if problems:
        raise ConfigError(*problems)


def _model(config: Config, name: str, served: Served) -> Iterator[str]:
    context, expected = config.engine.context, model_settings(config).get("model_type")
    if served.input_limit < context:
        yield (
            f"config.engine.context = {context}: {name} was started for prompts of {served.input_limit} tokens; start "
            "it with a longer --context-length, or lower the context"
        )
    if served.model_type != expected:
        yield (
            f"config.model.path = {config.model.path!r}: a model of type {expected!r}, {name} serves one of type "
            f"{served.model_type!r} ({served.model_path}); start it with this model, or name the one that it serves"
        )


def _settings(config: Config, name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Only what was set in `config` is asked for, except where weights or answers would be wrong."""
    launched = options(str(settings.get("launch_command") or "").split())
    for key, option, wanted in _demands(config):
        found = settings.get(option.removeprefix("--").replace("-", "_"))
        if wanted not in ("" if found is True else str(found), launched.get(option)):
            value, argument = getattr(config.inference, key), f"{option}={wanted}" if wanted else option
            yield (
                f"config.inference.{key} = {value!r}: {name} was started without {argument} (it says {found!r}); start "
                "it with that, or change the key to what it has"
            )
    inference, cached = config.inference, settings.get("disable_radix_cache") is not True
    if (inference.radix_cache != "auto" or inference.profile != "generic") and cached != profile(config).radix_cache:
        value, state = (inference.radix_cache, inference.profile), "on" if cached else "off"
        yield (
            f"config.inference.radix_cache, config.inference.profile = {value}: the radix cache of {name} is {state}; "
            f"start it the other way, or set {state!r} and 'generic'"
        )
    if is_hybrid(config):
        yield from _state(config, name, settings, cached)


def _demands(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key of `inference`, a server's option, the value that it must have: "" where it takes none)."""
    inference = config.inference
    yield "tensor_parallel", "--tp-size", str(inference.tensor_parallel)  # each rank is sent its weights
    if inference.device == "cpu":
        yield "device", "--device", "cpu"
    if inference.memory_fraction:
        yield "memory_fraction", "--mem-fraction-static", str(inference.memory_fraction)
    if inference.attention_backend:
        yield "attention_backend", "--attention-backend", inference.attention_backend
    if inference.fp32_head:
        yield "fp32_head", "--enable-fp32-lm-head", ""
    for option, value in options(inference.arguments).items():
        yield "arguments", option, value


def _state(config: Config, name: str, settings: Mapping[str, Any], cached: bool) -> Iterator[str]:
    text = model_settings(config)
    text = text.get("text_config", text)
    dtype = settings.get("mamba_ssm_dtype") or text.get("mamba_ssm_dtype") or "float32"  # SGLang's own order
    wanted = "float32" if cached else config.inference.state_dtype
    if dtype != wanted:
        why = "behind its radix cache a rounded state changes what follows" if cached else "the key asks for another"
        yield (
            f"config.inference.state_dtype = {config.inference.state_dtype!r}: {name} keeps the state of linear "
            f"attention as {dtype}, and {why}; start it with --mamba-ssm-dtype={wanted}"
        )


def options(words: Sequence[str]) -> dict[str, str]:
    """Of a command line: --name=value, --name value ... and --name, which has the value ""; a later one wins."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found
