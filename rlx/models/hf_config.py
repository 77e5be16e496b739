"""config.json of a Hugging Face checkpoint and `Architecture`, in both directions.

Two styles are in use: transformers 5 writes `rope_parameters` and `dtype`, 4.x wrote `rope_theta`, `rope_scaling` and
`torch_dtype`. Both are read, and both are written, so that readers of either kind find what they look for. What the
forward pass here would get wrong is refused with the reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rlx.models.files import read_json
from rlx.models.spec import Architecture

MODEL_TYPES: tuple[str, ...] = get_args(get_type_hints(Architecture)["model_type"])
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_architecture(directory: Path | str) -> Architecture:
    """Reads `directory`/config.json.

    Raises FileNotFoundError where there is none, and ValueError, naming key, value and reason, for what is unsupported.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a Hugging Face model directory is expected")
    try:
        return parse_architecture(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """`read_architecture` of the parsed JSON."""
    model_type = _model_type(config)
    _refuse_unsupported(config, model_type)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    arch = Architecture(
        model_type=model_type,  # type: ignore[arg-type]  # one of MODEL_TYPES
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads"),
        head_dim=_head_dim(config, model_type),
        rope_theta=_rope_theta(config),
        rms_norm_eps=float(_required(config, "rms_norm_eps")),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tied=bool(_required(config, "tie_word_embeddings")),
        max_positions=_integer(config, "max_position_embeddings"),
    )
    if arch.num_heads % arch.num_kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {arch.num_kv_heads}")
    if arch.head_dim % 2:
        raise ValueError(f"head_dim {arch.head_dim} is odd; rotary positions turn pairs of dimensions")
    return arch


def architecture_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    """config.json of `arch` with weights stored as `dtype`, in the keys of both styles."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[arch.model_type]],
        "model_type": arch.model_type,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "max_position_embeddings": arch.max_positions,
        "tie_word_embeddings": arch.tied,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return config if arch.model_type == "qwen2" else config | {"attention_bias": False}


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type in MODEL_TYPES:
        return str(model_type)
    near = difflib.get_close_matches(str(model_type), MODEL_TYPES, n=1)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(f"model_type {model_type!r} is not supported; these are: {', '.join(MODEL_TYPES)}{hint}")


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    bias = config.get("attention_bias")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    classes = config.get("architectures") or []
    reasons = {
        "hidden_act": config.get("hidden_act", "silu") != "silu" and "only silu is implemented",
        "use_sliding_window": config.get("use_sliding_window") and "every layer attends to the whole sequence here",
        "layer_types": layer_types and "only full_attention layers are implemented",
        "quantization_config": config.get("quantization_config") and "quantised weights are not read",
        "architectures": classes and CLASSES[model_type] not in classes and f"only {CLASSES[model_type]} is read",
        "attention_bias": {
            "qwen2": bias is False and "qwen2 has biases on q, k and v; write zeros where the model has none",
            "qwen3": bias and "biases of qwen3's attention are not implemented",
        }[model_type],
    }
    for key, reason in reasons.items():
        if reason:
            raise ValueError(f"{key} {config[key]!r} is not supported: {reason}")


def _head_dim(config: Mapping[str, Any], model_type: str) -> int:
    if config.get("head_dim") is not None or model_type != "qwen2":
        return _integer(config, "head_dim")
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is absent"
        )
    return hidden // heads


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies. `rope_parameters` (5.x) or `rope_theta` beside `rope_scaling` (4.x)."""
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{key}.rope_type {kind!r} is not supported: only plain rotary positions ('default') are")
        nested = sorted(name for name, entry in value.items() if isinstance(entry, Mapping))
        if nested:
            raise ValueError(f"{key} differs between kinds of layers ({', '.join(nested)}), which is not supported")
    for place in (parameters, scaling, config):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {place['partial_rotary_factor']} is not supported: 1.0 is")
    given = {float(p["rope_theta"]) for p in (parameters, scaling, config) if p.get("rope_theta") is not None}
    if not given:
        raise ValueError("rope_theta is not given, neither in rope_parameters nor beside it")
    if len(given) > 1:
        raise ValueError(f"contradictory values of rope_theta: {sorted(given)}")
    return given.pop()


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} {value!r} is not a positive whole number")
    return value


def _required(config: Mapping[str, Any], key: str) -> Any:
    """Defaults differ between versions of transformers, so nothing is assumed for a key that is absent."""
    if config.get(key) is None:
        raise ValueError(f"{key} is not given")
    return config[key]
