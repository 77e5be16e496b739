"""`rlx verify-model DIR`: does the forward and backward pass here agree with a stored reference of the checkpoint?

Compared are logits, log-probs, hidden states, the choices of routers and the norm of every parameter's gradient, as far
as the reference has them (`rlx.reference`).
Everything runs in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlx import cli
from rlx.models import transformer
from rlx.models.hf import is_ignored, load_params, read_architecture, to_hf
from rlx.models.moe import Routing
from rlx.models.spec import Architecture, Params
from rlx.reference import Reference, Routes, common_norms, read_reference

LOGIT_TOLERANCE = 2e-4  # absolute, of logits and of log-probs
GRADIENT_TOLERANCE = 5e-3  # relative, of each parameter's gradient norm
HIDDEN_TOLERANCE = 2e-4  # of hidden states, relative to the largest of their layer where that is above 1
MARGIN = 1e-4  # expert choices may differ where the scores around the last one chosen are this close
# Mixing snapshots of the stream loses digits: two float32 programs differ by more, in few places.
BANK_LOGIT_TOLERANCE, BANK_MEAN_TOLERANCE, BANK_HIDDEN_TOLERANCE = 2e-3, 3e-5, 2e-3


class Difference(NamedTuple):
    """The largest error of one compared quantity; `error` is NaN where something was not finite."""

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def verify(directory: Path, reference: Reference) -> list[Difference]:
    """Compares everything the reference holds. Raises ValueError where model and reference do not belong together."""
    arch = read_architecture(directory)
    if reference.logits.shape[-1] != arch.vocab_size or reference.input_ids.max() >= arch.vocab_size:
        raise ValueError(f"the reference is of a vocabulary of {reference.logits.shape[-1]}, not {arch.vocab_size}")
    params = jax.tree.map(jnp.asarray, load_params(directory, arch, "float32"))
    with jax.default_matmul_precision("highest"):
        differences = _compare_outputs(arch, params, reference)
        if reference.hidden_states is not None:
            differences += _compare_hidden(arch, params, reference.input_ids, reference.hidden_states)
        differences += _compare_gradients(arch, params, reference)
    return differences


# ------------------------------------------------------------------------------------------------------- comparisons


def _compare_outputs(arch: Architecture, params: Params, reference: Reference) -> list[Difference]:
    tokens = jnp.asarray(reference.input_ids)
    logits, routing = _outputs(arch, params, tokens, jnp.ones_like(tokens))
    logprobs = _token_logprobs(logits, tokens)
    bank = arch.residual_block is not None
    allowed = BANK_LOGIT_TOLERANCE if bank else LOGIT_TOLERANCE
    differences = [
        Difference("logits", _max_error(logits, reference.logits), allowed),
        Difference("token log-probs", _max_error(logprobs, reference.token_logprobs), allowed),
        *_compare_routes(arch, routing, reference.routes),
    ]
    if bank:
        mean = float(np.mean(np.abs(np.asarray(logits) - reference.logits)))
        differences.append(Difference("mean of logit errors", mean, BANK_MEAN_TOLERANCE))
    if reference.left_pad_logits is not None:
        padded, _ = _outputs(arch, params, tokens, jnp.asarray(reference.left_pad_mask))
        last = padded[1, -len(reference.left_pad_logits) :]
        differences.append(Difference("logits, left-padded", _max_error(last, reference.left_pad_logits), allowed))
    return differences


def _compare_routes(arch: Architecture, routing: Routing | None, routes: tuple[Routes, ...]) -> list[Difference]:
    """Of each layer of experts: choices that differ though the scores were not close, and weights of equal choices."""
    if len(routes) not in (0, len(arch.expert_layers)):
        raise ValueError(f"the reference has {len(routes)} routers, the model {len(arch.expert_layers)}")
    if routing is None or not routes:
        return []
    differences = []
    for i, (layer, theirs) in enumerate(zip(arch.expert_layers, routes, strict=True)):
        ours = (np.asarray(x[i]).reshape(theirs.choices.shape) for x in (routing.choices, routing.weights))
        (choices, weights), (wanted, wanted_weights) = _by_expert(*ours), _by_expert(*theirs)
        same = (choices == wanted).all(axis=1)
        clear = np.asarray(routing.margin[i]).reshape(-1) > MARGIN
        worst = float(np.abs(weights - wanted_weights)[same].max(initial=0.0))
        differences += [
            Difference(f"tokens routed otherwise, layer {layer}", float((clear & ~same).sum()), 0.0),
            Difference(f"router weights, layer {layer}", worst, LOGIT_TOLERANCE),
        ]
    return differences


def _by_expert(choices: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In the order of the experts: that of equal scores is nobody's."""
    order = np.argsort(choices, axis=1)
    return np.take_along_axis(choices, order, axis=1), np.take_along_axis(weights, order, axis=1)


def _compare_hidden(arch: Architecture, params: Params, input_ids: np.ndarray, stored: np.ndarray) -> list[Difference]:
    states = _hidden_states(arch, params, jnp.asarray(input_ids))
    if len(states) != len(stored):
        raise ValueError(f"the reference has {len(stored)} hidden states, the model {len(states)}")
    allowed = HIDDEN_TOLERANCE if arch.residual_block is None else BANK_HIDDEN_TOLERANCE
    differences = []
    for i, (found, wanted) in enumerate(zip(states, stored, strict=True)):
        error = _max_error(found, wanted) / max(1.0, float(np.abs(wanted).max()))
        differences.append(Difference(f"hidden states, {i}", error, allowed))
    return differences


def _compare_gradients(arch: Architecture, params: Params, reference: Reference) -> list[Difference]:
    gradient = jax.device_get(_gradient(arch, params, jnp.asarray(reference.input_ids)))
    ours = {
        name: float(np.linalg.norm(array))
        for name, array in to_hf(arch, gradient)
        if not name.endswith("e_score_correction_bias")  # it enters choices alone: no parameter elsewhere
    }
    theirs = {name: norm for name, norm in reference.gradient_norms.items() if not is_ignored(arch, name)}
    norms = common_norms(ours, theirs)
    # A norm that is zero in exact arithmetic has no meaningful relative error.
    floor = 1e-6 * max(norm for _, norm in norms.values())
    errors = {name: abs(found - norm) / max(norm, floor) for name, (found, norm) in norms.items()}
    return [Difference(f"gradient norm, {name}", error, GRADIENT_TOLERANCE) for name, error in errors.items()]


@partial(jax.jit, static_argnums=0)
def _outputs(
    arch: Architecture, params: Params, tokens: Int[Array, "b s"], mask: Int[Array, "b s"]
) -> tuple[Float[Array, "b s v"], Routing | None]:
    """`mask` is 1 on tokens and 0 on padding; positions count from the first token."""
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    hidden, routing = transformer.forward_routed(arch, params, tokens, positions, mask)
    return transformer.logits(params, hidden), routing


@partial(jax.jit, static_argnums=0)
def _hidden_states(arch: Architecture, params: Params, tokens: Int[Array, "b s"]) -> list[Float[Array, "b s d"]]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return transformer.hidden_states(arch, params, tokens, positions, jnp.ones_like(tokens))


@partial(jax.jit, static_argnums=0)
def _gradient(arch: Architecture, params: Params, tokens: Int[Array, "b s"]) -> Params:
    """Of the mean next-token NLL over the batch."""

    def loss(params: Params) -> Array:
        return -_token_logprobs(_outputs(arch, params, tokens, jnp.ones_like(tokens))[0], tokens).mean()

    return jax.grad(loss)(params)


def _token_logprobs(logits: Float[Array, "b s v"], tokens: Int[Array, "b s"]) -> Float[Array, "b s-1"]:
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def _max_error(found: Array, wanted: np.ndarray[Any, Any]) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"the reference has shape {wanted.shape} where {found.shape} was expected")
    return float(np.max(np.abs(np.asarray(found) - wanted)))


# ------------------------------------------------------------------------------------------------------------- command


def summary(differences: list[Difference]) -> dict[str, Any]:
    """The last line of `--json`: null for an error that is not a number, as JSON has none, and for what the reference
    does not have."""

    def largest(*starts: str) -> float | None:
        errors = [d.error for d in differences if d.name.startswith(starts)]
        return max(errors) if errors and all(map(math.isfinite, errors)) else None

    return {
        "ok": all(d.ok for d in differences),
        "max_logit_error": largest("logits"),
        "max_logprob_error": largest("token log-probs"),
        "max_gradient_norm_error": largest("gradient norm"),
        "max_hidden_state_error": largest("hidden states"),
        "tokens_routed_otherwise": largest("tokens routed otherwise"),
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
