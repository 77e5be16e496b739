"""config.json of a Hugging Face checkpoint and `Architecture`, in both directions.

Two styles are in use: transformers 5 writes `rope_parameters` and `dtype`, 4.x wrote `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read; a saved model has the config.json that it was read from. What the forward pass here would
get wrong is refused with the reason.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.models.config_values import integer, refuse, required
from rlx.models.description import Architecture, Attention, LatentAttention, Layer, grouped
from rlx.models.families import FAMILIES as ATTENTION_FAMILIES
from rlx.models.files import read_json
from rlx.models.hybrids import HYBRIDS

FAMILIES = ATTENTION_FAMILIES | HYBRIDS
MODEL_TYPES = tuple(FAMILIES)
UNBOUNDED = 2**31 - 1  # what int32 positions can count
ACTIVATIONS = ("silu", "situ")


def read_config(directory: Path | str) -> Architecture:
    """Reads `directory`/config.json.

    Raises FileNotFoundError where there is none, and ValueError, naming key, value and reason, for what is unsupported.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a Hugging Face model directory is expected; `make model` makes "
            "models/smollm2-135m-instruct"
        )
    try:
        return parse_architecture(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """`read_config` of the parsed JSON."""
    model_type = _model_type(config)
    family, tower = FAMILIES[model_type], config.get("text_config") or config
    classes = config.get("architectures") or []
    refuse(
        config,
        {
            "architectures": classes
            and not set(classes) & set(family.classes)
            and f"only {' and '.join(family.classes)} is read",
            "quantization_config": not _readable(config.get("quantization_config")) and "only MXFP4 weights are read",
        },
    )
    activation = tower.get("hidden_act", "silu")
    refuse(tower, {"hidden_act": activation not in ACTIVATIONS and "only silu is implemented"})
    described = family.describe(tower)
    return Architecture(
        model_type=model_type,
        vocab_size=integer(tower, "vocab_size"),
        hidden_size=integer(tower, "hidden_size"),
        groups=grouped(described.layers),
        norm=described.norm,
        rms_norm_eps=float(required(tower, "rms_norm_eps")),
        tied=_tied(config, tower),
        max_positions=_max_positions(tower, described.layers),
        residual_block=described.residual_block,
        names=described.names,
        config=json.dumps(dict(config), sort_keys=True),
    )


def architecture_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """config.json of `arch` with weights stored as `dtype`."""
    config: dict[str, Any] = json.loads(arch.config)
    # Optional here, but what engines choose their implementation by.
    config["architectures"] = config.get("architectures") or [FAMILIES[arch.model_type].classes[0]]
    for place in (config, config.get("text_config")):
        if place is not None:
            place.pop("quantization_config", None)
            place |= {"dtype": dtype, "torch_dtype": dtype}
    return config


def _readable(quantisation: Mapping[str, Any] | None) -> bool:
    """Is it none, or the packed MXFP4 of compressed-tensors?"""
    formats = {value for value in (quantisation or {}).values() if isinstance(value, str)}
    return not quantisation or any(value.startswith("mxfp4") for value in formats)


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type in MODEL_TYPES:
        return str(model_type)
    near = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(f"model_type {model_type!r} is not supported; these are: {', '.join(MODEL_TYPES)}{hint}")


def _tied(config: Mapping[str, Any], tower: Mapping[str, Any]) -> bool:
    """Of a model with towers both levels may say it; the language model's own counts."""
    return bool(required(config if tower.get("tie_word_embeddings") is None else tower, "tie_word_embeddings"))


def _max_positions(tower: Mapping[str, Any], layers: tuple[Layer, ...]) -> int:
    """Where no layer rotates by positions there may be no bound."""
    rotating = any(isinstance(x.mixer, Attention | LatentAttention) and x.mixer.rope is not None for x in layers)
    if not rotating and not {"model_max_length", "max_position_embeddings"} & tower.keys():
        return UNBOUNDED
    return integer(tower, "model_max_length" if "model_max_length" in tower else "max_position_embeddings")
