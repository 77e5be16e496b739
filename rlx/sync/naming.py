"""What SGLang makes of the tensors of a checkpoint when it serves them: some are fused, some are padded.

A checkpoint's q_proj, k_proj and v_proj are the rows of one qkv_proj, gate_proj and up_proj those of one gate_up_proj.
Zeros fill the vocabulary up to a multiple of 64 and, on a CPU, an MLP's width to a multiple of 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VOCABULARY_MULTIPLE, MLP_MULTIPLE = 64, 32
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_INTO = {part: fused for fused, parts in FUSED.items() for part in parts}
_DENSE = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.(q|k|v|o)_proj|self_attn\.(q|k)_norm|mlp\.(gate|up|down)_proj))\.(weight|bias)$|lm_head\.weight$"
)


def served_layout_unsupported_reason(names: Iterable[str]) -> str | None:
    """Why the served layout of these checkpoint names is not known; None where it is."""
    unknown = sorted(name for name in names if not _DENSE.match(name))
    if unknown:
        return f"the layout that SGLang gives {unknown[0]} ({len(unknown)} tensors of its kind) is not known"
    return None


def served_name(name: str) -> str:
    """The name of the served tensor that holds the checkpoint's tensor `name`."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FUSED_INTO[last]}.{leaf}" if last in _FUSED_INTO else name


def served_parts(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Served name -> the checkpoint's tensors that it is made of, first rows first."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(served_name(name), []).append(name)
    return {served: tuple(sorted(found, key=_place)) for served, found in parts.items()}


def _place(name: str) -> int:
    last = name.split(".")[-2]
    return FUSED[_FUSED_INTO[last]].index(last) if last in _FUSED_INTO else 0


def served_shape(name: str, shape: tuple[int, ...], device: str = "cpu") -> tuple[int, ...]:
    """`shape` of the checkpoint's tensor `name` with the zeros behind its rows and columns."""
    last = name.split(".")[-2]
    if last in ("embed_tokens", "lm_head"):
        return _up(shape[0], VOCABULARY_MULTIPLE), *shape[1:]
    if device != "cpu":
        return shape
    if last in ("gate_proj", "up_proj"):
        return _up(shape[0], MLP_MULTIPLE), *shape[1:]
    if last == "down_proj":
        return *shape[:-1], _up(shape[-1], MLP_MULTIPLE)
    return shape


def _up(length: int, multiple: int) -> int:
    return length + -length % multiple
