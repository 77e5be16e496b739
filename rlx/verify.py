"""`rlx verify-model DIR`: does the forward and backward pass here agree with a stored reference of the checkpoint?

A reference is an npz with input_ids [B, S], logits [B, S, V], token_logprobs [B, S-1] and optionally a left-padded
case, beside a meta.json whose `grad_norms_by_torch_param` holds the norm of every parameter's gradient of the mean
next-token NLL over the batch. Everything runs in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlx import cli
from rlx.models import transformer
from rlx.models.files import read_json
from rlx.models.hf import load_params, read_architecture, to_hf
from rlx.models.spec import Architecture, Params

LOGIT_TOLERANCE = 1e-4  # absolute, of logits and of log-probs
GRADIENT_TOLERANCE = 1e-3  # relative, of each parameter's gradient norm


class Difference(NamedTuple):
    """The largest error of one compared quantity; `error` is NaN where something was not finite."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


class Reference(NamedTuple):
    input_ids: np.ndarray[Any, Any]  # int32 [B, S]
    logits: np.ndarray[Any, Any]  # float32 [B, S, V]
    token_logprobs: np.ndarray[Any, Any]  # float32 [B, S - 1]
    left_pad_mask: np.ndarray[Any, Any] | None  # int32 [B, S], 0 = padding, where the reference has the case
    left_pad_logits: np.ndarray[Any, Any] | None  # float32 [n, V]: row 1, its last n tokens
    gradient_norms: Mapping[str, float]  # by the checkpoint's names


def verify(directory: Path, reference: Reference) -> list[Difference]:
    """Compares everything the reference holds. Raises ValueError where model and reference do not belong together."""
    arch = read_architecture(directory)
    if reference.logits.shape[-1] != arch.vocab_size or reference.input_ids.max() >= arch.vocab_size:
        raise ValueError(f"the reference is of a vocabulary of {reference.logits.shape[-1]}, not {arch.vocab_size}")
    params = jax.tree.map(jnp.asarray, load_params(directory, arch, "float32"))
    with jax.default_matmul_precision("highest"):
        differences = _compare_outputs(arch, params, reference)
        differences += _compare_gradients(arch, params, reference)
    return differences


# ------------------------------------------------------------------------------------------------------- comparisons


def _compare_outputs(arch: Architecture, params: Params, reference: Reference) -> list[Difference]:
    tokens = jnp.asarray(reference.input_ids)
    logits = _logits(arch, params, tokens, jnp.ones_like(tokens))
    logprobs = _token_logprobs(logits, tokens)
    differences = [
        Difference("logits", _max_error(logits, reference.logits), LOGIT_TOLERANCE),
        Difference("token log-probs", _max_error(logprobs, reference.token_logprobs), LOGIT_TOLERANCE),
    ]
    if reference.left_pad_logits is not None:
        padded = _logits(arch, params, tokens, jnp.asarray(reference.left_pad_mask))
        last = padded[1, -len(reference.left_pad_logits) :]
        differences.append(
            Difference("logits, left-padded", _max_error(last, reference.left_pad_logits), LOGIT_TOLERANCE)
        )
    return differences


def _compare_gradients(arch: Architecture, params: Params, reference: Reference) -> list[Difference]:
    gradient = jax.device_get(_gradient(arch, params, jnp.asarray(reference.input_ids)))
    norms = {name: float(np.linalg.norm(array)) for name, array in to_hf(arch, gradient)}
    if norms.keys() != reference.gradient_norms.keys():
        odd = sorted(norms.keys() ^ reference.gradient_norms.keys())
        raise ValueError(f"the model and the reference's gradient norms differ in their parameters: {odd[:6]}")
    # A norm that is zero in exact arithmetic has no meaningful relative error.
    floor = 1e-6 * max(reference.gradient_norms.values())
    errors = {name: abs(norms[name] - norm) / max(norm, floor) for name, norm in reference.gradient_norms.items()}
    return [Difference(f"gradient norm, {name}", error, GRADIENT_TOLERANCE) for name, error in errors.items()]


@partial(jax.jit, static_argnums=0)
def _logits(
    arch: Architecture, params: Params, tokens: Int[Array, "b s"], mask: Int[Array, "b s"]
) -> Float[Array, "b s v"]:
    """`mask` is 1 on tokens and 0 on padding; positions count from the first token."""
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    hidden = transformer.forward(arch, params, tokens, positions, mask)
    return transformer.logits(params, hidden)


@partial(jax.jit, static_argnums=0)
def _gradient(arch: Architecture, params: Params, tokens: Int[Array, "b s"]) -> Params:
    """Of the mean next-token NLL over the batch."""

    def loss(params: Params) -> Array:
        return -_token_logprobs(_logits(arch, params, tokens, jnp.ones_like(tokens)), tokens).mean()

    return jax.grad(loss)(params)


def _token_logprobs(logits: Float[Array, "b s v"], tokens: Int[Array, "b s"]) -> Float[Array, "b s-1"]:
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def _max_error(found: Array, wanted: np.ndarray[Any, Any]) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"the reference has shape {wanted.shape} where {found.shape} was expected")
    return float(np.max(np.abs(np.asarray(found) - wanted)))


# ---------------------------------------------------------------------------------------------------------- reference


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
        pad_mask, pad_logits = _left_padded(arrays)
        ids, logits, logprobs = arrays["input_ids"], arrays["logits"], arrays["token_logprobs"]
    norms = read_json(path.parent / "meta.json").get("grad_norms_by_torch_param")
    if not norms:
        raise ValueError(f"{path.parent / 'meta.json'} lacks grad_norms_by_torch_param")
    return Reference(ids, logits, logprobs, pad_mask, pad_logits, norms)


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


# ------------------------------------------------------------------------------------------------------------- command


def summary(differences: list[Difference]) -> dict[str, Any]:
    """The last line of `--json`. An error that is not a number is null: JSON has no NaN."""

    def largest(*starts: str) -> float | None:
        errors = [d.error for d in differences if d.name.startswith(starts)]
        return None if not all(map(math.isfinite, errors)) else max(errors)

    return {
        "ok": all(d.ok for d in differences),
        "max_logit_error": largest("logits"),
        "max_logprob_error": largest("token log-probs"),
        "max_gradient_norm_error": largest("gradient norm"),
    }


def table(differences: list[Difference]) -> str:
    width = max(len(d.name) for d in differences)
    lines = [f"{'compared':<{width}}  {'error':>9}  {'allowed':>9}"]
    lines += [f"{d.name:<{width}}  {d.error:9.2e}  {d.tolerance:9.2e}{'' if d.ok else '  FAILED'}" for d in differences]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 = agrees, 1 = differs, 2 = the model or the reference cannot be read."""
    parser = argparse.ArgumentParser(prog="rlx verify-model", description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="a Hugging Face model directory")
    parser.add_argument("--reference", type=Path, help="the stored reference (default: DIRECTORY/reference.npz)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args(argv)
    try:
        reference = read_reference(arguments.reference or arguments.directory / "reference.npz")
        differences = verify(arguments.directory, reference)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(differences))
    result = summary(differences)
    print("agrees with the reference" if result["ok"] else "differs from the reference")
    if arguments.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(cli.run("verify-model", sys.argv[1:]))
