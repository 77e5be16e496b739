"""`token_stats` and `token_loss`: one entry for every implementation of the log-prob head, and the choice of one."""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlx_kernels import dispatch
from rlx_kernels.logprob import fused, mosaic, reference, xla
from rlx_kernels.logprob.precision import PRECISIONS, Precision, resolve
from rlx_kernels.logprob.reference import TokenStats
from rlx_kernels.logprob.tiling import varying

__all__ = ["Precision", "TokenStats", "token_loss", "token_stats", "unsupported_reason"]


class Implementation(NamedTuple):
    """token_stats(hidden, head, targets, candidates, *, temperature, vocab_axis, precision) and
    unsupported_reason(hidden, head, targets, candidates, vocab_axis, precision), both on checked arguments."""

    name: str
    automatic: bool  # implementation=None may choose it
    token_stats: Callable[..., TokenStats]
    unsupported_reason: Callable[..., str | None]


# In order of preference. The dense one is never chosen unasked: its memory is that of the logits.
IMPLEMENTATIONS = (
    Implementation("mosaic", True, mosaic.token_stats, mosaic.unsupported_reason),
    Implementation("xla", True, xla.token_stats, xla.unsupported_reason),
    Implementation("reference", False, reference.token_stats, reference.unsupported_reason),
)


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    precision: Precision | None = None,
    implementation: str | None = None,
) -> TokenStats:
    """Statistics of softmax(hidden @ head.T / temperature) at each token, float32, in nats.

    Differentiable (reverse mode, once) in `hidden` and `head` through every output; a head that is not differentiated
    costs nothing in the backward pass. Ids lie in [0, V); an id outside gives NaN at its place. Candidates may repeat
    and may hold the target.

    `hidden` and `head` are float32 or bfloat16, each for itself. `precision` is that of the matrix products, forwards
    and backwards, which always accumulate in float32: "bfloat16", "bfloat16_3x" (three bfloat16 products, about
    float32's accuracy on matrix units), "tensorfloat32", "float32"; None is "bfloat16" where both arrays are bfloat16,
    else "float32". Arrays of float64, and precision "float64", are for checks of everything else: all sums and outputs
    are float64 then. An "FP32 head" (arXiv 2506.13585) is float32 `hidden`, not rounded after the last norm, with
    precision "float32", over a head of either dtype.

    Inside `jax.shard_map`, `vocab_axis` names the mesh axis over which the head's rows are sharded, in order: `head`
    is then this device's [V / shards, D], ids stay those of the whole vocabulary, every output is the whole
    vocabulary's. Outside of it nothing is known of shardings: over sharded tokens call it inside `jax.shard_map`.
    Do not wrap it in `jax.checkpoint`: it recomputes its logits by itself.

    `implementation` is "mosaic" (kernels for Hopper GPUs), "xla", "reference" (dense, for tests), or None: the first
    of "mosaic" and "xla" that can serve.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.

    Source: the entropy and its gradient follow from H = log s - u/s with s = sum e^(z-m), u = sum e^(z-m)(z-m), the
    online softmax of arXiv 1805.02867 with one more moment; recomputing logits instead of keeping them follows
    Cut Cross-Entropy, arXiv 2411.09009.
    """
    check_arguments(hidden, head, targets, candidates, temperature, precision)
    precision = resolve(precision, hidden, head)
    serving = _resolve(implementation, hidden, head, targets, candidates, vocab_axis, precision)
    return serving.token_stats(
        hidden,
        head,
        _int32(targets),
        None if candidates is None else _int32(candidates),
        temperature=temperature,
        vocab_axis=vocab_axis,
        precision=precision,
    )


def token_loss(
    loss_fn: Callable[[TokenStats, Any], Float[Array, ""]],
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    arguments: Any = (),
    *,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    precision: Precision | None = None,
) -> tuple[Float[Array, ""], TokenStats]:
    """(loss_fn(stats, arguments), stats) as with `token_stats`, the gradient taken in the forward pass.

    Differentiated, it multiplies by the head's matrix once forwards and once for each array that trains: two products
    for a frozen head, three for a trained one, where `token_stats` needs one more. Legal only where the loss is a sum
    over tokens, loss = Σ_t f_t(stats_t): `loss_fn` is called on chunks of consecutive tokens, and its value on all of
    them must be the sum of its values on the chunks. A mean over tokens is a sum whose denominator is an argument;
    ratios or clips of whole sequences are not sums, and nothing can notice that: use `token_stats` for them.

    `loss_fn(stats, arguments)` gets the statistics of a chunk and the same rows of every array in `arguments` (a pytree
    of arrays [T, ...], and scalars, which it gets whole) and returns a float32 scalar. Gradients flow to `hidden` and
    `head` only: `arguments` and the statistics that are returned, for metrics, are constants, and `loss_fn` must not
    close over arrays that are differentiated. Not differentiated, it costs what `token_stats` does. Do not wrap it in
    `jax.checkpoint`. The other parameters are those of `token_stats`; it runs in XLA on every backend.

    Raises:
      ValueError: as `token_stats`, or a loss that is no float32 scalar or differs between shards of the vocabulary.
    """
    check_arguments(hidden, head, targets, candidates, temperature, precision)
    _check_loss_arguments(arguments, hidden.shape[0])
    precision = resolve(precision, hidden, head)
    if precision == "float64":
        raise ValueError("token_loss has no float64: cast hidden and head to float32, or use token_stats")
    _resolve("xla", hidden, head, targets, candidates, vocab_axis, precision)
    return fused.token_loss(
        loss_fn,
        hidden,
        head,
        _int32(targets),
        None if candidates is None else _int32(candidates),
        arguments,
        temperature=temperature,
        vocab_axis=vocab_axis,
        precision=precision,
    )


def unsupported_reason(
    implementation: str,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    vocab_axis: str | None = None,
    precision: Precision | None = None,
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can.

    Raises:
      ValueError: an unknown implementation, or arguments that `token_stats` refuses whatever the implementation.
    """
    check_arguments(hidden, head, targets, candidates, 1.0, precision)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if vocab_axis is not None and vocab_axis not in manual:
        return (
            f"vocab_axis={vocab_axis!r} is not a manual mesh axis here ({_listed(manual)}): call inside jax.shard_map"
        )
    if vocab_axis is not None and vocab_axis not in varying(head):
        return (
            f"head does not vary over vocab_axis={vocab_axis!r}: shard its rows over that axis in shard_map's in_specs "
            "and leave check_vma=True, from which the backward pass knows where to sum"
        )
    precision = resolve(precision, hidden, head)
    return _find(implementation).unsupported_reason(hidden, head, targets, candidates, vocab_axis, precision)


def _resolve(name, hidden, head, targets, candidates, vocab_axis, precision) -> Implementation:
    tried = [_find(name)] if name is not None else [i for i in IMPLEMENTATIONS if i.automatic]

    def reason(implementation: Implementation) -> str | None:
        return unsupported_reason(
            implementation.name, hidden, head, targets, candidates, vocab_axis=vocab_axis, precision=precision
        )

    return dispatch.resolve("the log-prob head", tried, reason)


def _find(name: str) -> Implementation:
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    raise ValueError(_unknown("implementation", name, [i.name for i in IMPLEMENTATIONS]))


def _unknown(argument: str, name: Any, names) -> str:
    if not isinstance(name, str):
        return f"{argument}={name!r} is a {type(name).__name__}, not a string: one of {_listed(names)}, or None"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"{argument}={name!r} is unknown; nearest: {nearest!r}, all: {_listed(names)}, or None"


def check_arguments(hidden, head, targets, candidates, temperature, precision):
    lowest, highest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    # a number that float32 rounds to 0 or infinity would make every logit infinite or 0
    if not isinstance(temperature, int | float | np.number) or not lowest <= temperature <= highest:
        raise ValueError(
            f"temperature={temperature!r} must be a finite Python number above 0, from {lowest:.2g} to "
            f"{highest:.2g}, static under jit; for greedy sampling at temperature 0 score the policy at 1.0"
        )
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise ValueError(_unknown("precision", precision, PRECISIONS))
    if precision == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("precision='float64' needs jax's 64-bit types: run inside jax.enable_x64(True)")
    arrays = {"hidden": hidden, "head": head, "targets": targets}
    for name, x in (arrays if candidates is None else arrays | {"candidates": candidates}).items():
        if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
            raise ValueError(f"{name} is a {type(x).__name__}, {x!r:.60}; it must be an array: jnp.asarray({name})")
    _check_matrices(hidden, head)
    _check_ids(hidden.shape[0], targets, candidates)


def _check_matrices(hidden, head):
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(
            f"hidden {hidden.shape} and head {head.shape} must be [T, D] and [V, D] of the same D: "
            "flatten the batch, and transpose a head stored as [D, V]"
        )
    if 0 in (*hidden.shape, *head.shape):
        raise ValueError(
            f"hidden [T, D] {hidden.shape} and head [V, D] {head.shape} must have at least one token, one column and "
            "one row of the vocabulary: do not call for an empty batch"
        )
    for name, x in (("hidden", hidden), ("head", head)):
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
            raise ValueError(f"{name} is {x.dtype}; it must be float32, bfloat16 or float64: cast it")


def _check_ids(tokens: int, targets, candidates):
    for name, ids, ndim in (("targets", targets, 1), ("candidates", candidates, 2)):
        if ids is None:
            continue
        if ids.ndim != ndim or ids.shape[0] != tokens or not jnp.issubdtype(ids.dtype, jnp.signedinteger):
            wanted = "[T]" if ndim == 1 else "[T, K]"
            raise ValueError(f"{name} {ids.dtype}{list(ids.shape)} must be signed integers {wanted} with T = {tokens}")


def _int32(ids: jax.Array | np.ndarray) -> jax.Array:
    """In 32 bits, where no arithmetic on ids wraps; an id too large for them stays outside of every vocabulary."""
    if ids.dtype.itemsize > 4:
        ids = ids.clip(-1, np.iinfo(np.int32).max)
    return jnp.asarray(ids, jnp.int32)


def _check_loss_arguments(arguments, tokens: int):
    for path, x in jax.tree_util.tree_leaves_with_path(arguments):
        shape = jnp.shape(x)
        if shape and shape[0] != tokens:
            raise ValueError(
                f"arguments{jax.tree_util.keystr(path)} has shape {shape}; every array of the loss must be a scalar or "
                f"[T, ...] with T = {tokens}, because loss_fn gets chunks of tokens"
            )


def _listed(names) -> str:
    return ", ".join(repr(n) for n in names) or "none"
