"""Values of a config.json, and its rotary positions, read with a reason where they cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.models.description import Rope, Yarn
from rlx.models.rope import yarn_scale

Config = Mapping[str, Any]


def required(config: Config, key: str) -> Any:
    """Defaults differ between versions of transformers, so nothing is assumed for a key that is absent."""
    if config.get(key) is None:
        raise ValueError(f"{key} is not given")
    return config[key]


def integer(config: Config, key: str) -> int:
    value = required(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} {value!r} is not a positive whole number")
    return value


def refuse(config: Config, reasons: Mapping[str, Any]) -> None:
    """Raises ValueError for the first key whose entry is a reason, not false."""
    for key, reason in reasons.items():
        if reason:
            raise ValueError(f"{key} {config.get(key)!r} is not supported: {reason}")


def layer_kinds(config: Config, kinds: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, of which each must be one of `kinds`; `default` where the key is absent."""
    found = tuple(config.get("layer_types") or default)
    if set(found) - set(kinds):
        raise ValueError(f"layer_types {list(found)!r} is not supported: only {' and '.join(kinds)} layers are")
    if len(found) != integer(config, "num_hidden_layers"):
        raise ValueError(f"layer_types names {len(found)} layers, num_hidden_layers is {config['num_hidden_layers']}")
    return found


def read_rope(config: Config, head_dim: int, kind: str | None = None, *, interleaved: bool = False) -> Rope:
    """Rotary positions from `rope_parameters` (transformers 5) or from `rope_theta` beside `rope_scaling` (4).

    kind: the kind of layer, in families where they differ (`rope_parameters` is nested there).
    """
    given = rope_values(config, kind)
    scaling = given["rope_type"]
    theta = float(required(given, "rope_theta"))
    dim = int(head_dim * float(given.get("partial_rotary_factor") or 1.0))
    if dim < 2 or dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd, or becomes {dim}; rotary positions turn pairs of dimensions")
    return Rope(theta, dim, interleaved, read_yarn(given) if scaling == "yarn" else None)


def rope_values(config: Config, kind: str | None) -> dict[str, Any]:
    """What config.json says of rotary positions, of either style, as one mapping."""
    parameters, scaling = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    nested = sorted(name for name, entry in parameters.items() if isinstance(entry, Mapping))
    if nested and kind not in nested:
        raise ValueError(f"rope_parameters differs between kinds of layers ({', '.join(nested)}), which is unsupported")
    if nested:
        parameters = dict(parameters[kind])
    elif kind == "sliding_attention":
        scaling = {}  # in the older style it is that of the layers that see everything
    places = (parameters, scaling, config)
    values = {**scaling, **parameters, "rope_type": _rope_type(parameters, scaling)}
    for key in ("rope_theta", "partial_rotary_factor"):
        found = {float(place[key]) for place in places if place.get(key) is not None}
        if len(found) > 1:
            raise ValueError(f"contradictory values of {key}: {sorted(found)}")
        values |= {key: found.pop()} if found else {}
    if "rope_theta" not in values:
        raise ValueError("rope_theta is not given, neither in rope_parameters nor beside it")
    return values


def _rope_type(parameters: Config, scaling: Config) -> str:
    kinds = {}
    for key, place in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if place:
            kinds[key] = str(place.get("rope_type", place.get("type", "default")))
            if kinds[key] not in ("default", "yarn"):
                raise ValueError(f"{key}.rope_type {kinds[key]!r} is not supported: 'default' and 'yarn' are")
    if len(set(kinds.values())) > 1:
        raise ValueError(f"contradictory values of rope_type: {kinds}")
    return next(iter(kinds.values()), "default")


def read_yarn(given: Config) -> Yarn:
    factor = float(required(given, "factor"))
    scales = given.get("mscale"), given.get("mscale_all_dim")
    if given.get("attention_factor") is not None:
        table_scale = float(given["attention_factor"])
    elif all(scales):
        table_scale = yarn_scale(factor, float(scales[0])) / yarn_scale(factor, float(scales[1]))  # type: ignore[arg-type]
    else:
        table_scale = yarn_scale(factor)
    return Yarn(
        factor=factor,
        original_positions=integer(given, "original_max_position_embeddings"),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        table_scale=table_scale,
    )
