"""A stored reference of a checkpoint, made by another implementation: outputs in an npz, gradient norms in meta.json.

The npz has input_ids [B, S], logits [B, S, V], token_logprobs [B, S-1] and, where they were kept, hidden_states
[L+1, B, S, D] (the last after the final norm), router0_indices and router0_weights [B·S, k] and so on for each layer of
experts, and a left-padded case.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.models.files import read_json

NORMS = ("grad_norms_by_torch_param", "grad_norms")  # keys of meta.json, by a module's or by the file's names

# One name for what implementations call differently, and for what some keep in one tensor and some in several.
SAME = (
    (r"^.*?(?=layers\.\d+\.|embed_tokens|lm_head|norm\.weight|output_attn)", ""),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight.*$", ".experts.gate_up_proj"),
    (r"\.experts\.\d+\.(down_proj|w2)\.weight.*$", ".experts.down_proj"),
    (r"\.[qkv]_conv1d\.", ".conv1d."),
    (r"\.forget_gate\.", "."),
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"\.linear_attn\.out_proj\.", ".linear_attn.o_proj."),
    (r"\.linear_attn\.norm\.", ".linear_attn.o_norm."),
)


class Routes(NamedTuple):
    """Of one layer of experts."""

    choices: np.ndarray[Any, Any]  # int32 [B·S, k]
    weights: np.ndarray[Any, Any]  # float32 [B·S, k]


class Reference(NamedTuple):
    input_ids: np.ndarray[Any, Any]  # int32 [B, S]
    logits: np.ndarray[Any, Any]  # float32 [B, S, V]
    token_logprobs: np.ndarray[Any, Any]  # float32 [B, S - 1]
    left_pad_mask: np.ndarray[Any, Any] | None  # int32 [B, S], 0 = padding, where the reference has the case
    left_pad_logits: np.ndarray[Any, Any] | None  # float32 [n, V]: row 1, its last n tokens
    hidden_states: np.ndarray[Any, Any] | None  # float32 [L + 1, B, S, D]
    routes: tuple[Routes, ...]  # of the layers of experts, in order
    # Of the mean next-token NLL over the batch, by the names they were written with; None where there is no gradient.
    gradient_norms: Mapping[str, float | None]


def read_reference(path: Path) -> Reference:
    """Reads an npz and the meta.json beside it. Raises FileNotFoundError, or ValueError where something is missing."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: give --reference FILE, an npz of input_ids, logits and token_logprobs that another "
            "implementation made, with the gradient norms in a meta.json beside it"
        )
    with _open_npz(path) as arrays:
        missing = [name for name in ("input_ids", "logits", "token_logprobs") if name not in arrays]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        count = sum(bool(re.fullmatch(r"router\d+_indices", name)) for name in arrays)
        return Reference(
            arrays["input_ids"],
            arrays["logits"],
            arrays["token_logprobs"],
            *_left_padded(arrays),
            arrays.get("hidden_states"),
            tuple(Routes(arrays[f"router{i}_indices"], arrays[f"router{i}_weights"]) for i in range(count)),
            _gradient_norms(path.parent / "meta.json"),
        )


def _gradient_norms(path: Path) -> dict[str, float | None]:
    meta = read_json(path)
    found = next((meta[key] for key in NORMS if meta.get(key)), None)
    if not found:
        raise ValueError(f"{path} lacks {NORMS[0]}")
    return dict(found)


def _open_npz(path: Path) -> Any:
    try:
        arrays = np.load(path, allow_pickle=False)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an npz of arrays: {error}") from error
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds a single array; an npz with input_ids, logits and token_logprobs is expected")
    return arrays


def _left_padded(arrays: Mapping[str, Any]) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None]:
    names = [name for name in arrays if name.startswith("logits_left_pad_row1_last")]
    if not names:
        return None, None
    if "left_pad_mask" not in arrays:
        raise ValueError(f"the reference has {names[0]} but no left_pad_mask")
    return arrays["left_pad_mask"], arrays[names[0]]


# ------------------------------------------------------------------------------------------------------ gradient norms


def common_norms(ours: Mapping[str, float], theirs: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """(our norm, theirs) of each parameter that the reference has a gradient of, by its name where both have that one,
    else by what both sides' tensors can be put together to.

    Raises ValueError where one side has a parameter that the other does not know.
    """
    found: Mapping[str, float | None] = ours
    if ours.keys() != theirs.keys():
        found, theirs = _joined(ours), _joined(theirs)
    known = {name: norm for name, norm in theirs.items() if norm is not None}
    if odd := sorted((known.keys() - found.keys()) | (found.keys() - theirs.keys())):
        raise ValueError(f"the model and the reference's gradient norms differ in their parameters: {odd[:6]}")
    return {name: (found[name] or 0.0, norm) for name, norm in known.items()}


def _joined(norms: Mapping[str, float | None]) -> dict[str, float | None]:
    """Root of the sum of squares, over tensors that have one common name; None where none has a gradient."""
    joined: dict[str, float | None] = {}
    for name, norm in norms.items():
        common = _common(name)
        before = joined.get(common)
        joined[common] = before if norm is None else math.hypot(before or 0.0, norm)
    return joined


def _common(name: str) -> str:
    for pattern, replacement in SAME:
        name = re.sub(pattern, replacement, name)
    return name
