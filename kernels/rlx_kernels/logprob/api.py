"""`token_stats`: one entry for every implementation of the log-prob head, and the choice between them."""

import difflib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob import reference, xla
from rlx_kernels.logprob.reference import TokenStats

__all__ = ["TokenStats", "token_stats", "unsupported_reason"]


class Implementation(NamedTuple):
    """token_stats(hidden, head, targets, candidates, *, temperature, vocab_axis) and
    unsupported_reason(hidden, head, targets, candidates, vocab_axis), both on checked arguments."""

    name: str
    automatic: bool  # implementation=None may choose it
    token_stats: Callable[..., TokenStats]
    unsupported_reason: Callable[..., str | None]


# In order of preference. The dense one is never chosen unasked: its memory is that of the logits.
IMPLEMENTATIONS = (
    Implementation("xla", True, xla.token_stats, xla.unsupported_reason),
    Implementation("reference", False, reference.token_stats, reference.unsupported_reason),
)


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, "tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float = 1.0,
    vocab_axis: str | None = None,
    implementation: str | None = None,
) -> TokenStats:
    """Statistics of softmax(hidden @ head.T / temperature) at each token, float32, in nats.

    Differentiable (reverse mode, once) in `hidden` and `head` through every output; a head that is not differentiated
    costs nothing in the backward pass. `hidden` and `head` are both float32 or both bfloat16, products accumulate in
    float32. Ids lie in [0, V); an id outside gives NaN at its place. Candidates may repeat and may hold the target.

    Inside `jax.shard_map`, `vocab_axis` names the mesh axis over which the head's rows are sharded, in order: `head`
    is then this device's [V / shards, D], ids stay those of the whole vocabulary, every output is the whole
    vocabulary's. Outside of it nothing is known of shardings: over sharded tokens call it inside `jax.shard_map`.
    Do not wrap it in `jax.checkpoint`: it recomputes its logits by itself.

    `implementation` is "xla", "reference" (dense, for tests), or None: the first that can serve.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.

    Source: the entropy and its gradient follow from H = log s - u/s with s = sum e^(z-m), u = sum e^(z-m)(z-m), the
    online softmax of arXiv 1805.02867 with one more moment; recomputing logits instead of keeping them follows
    Cut Cross-Entropy, arXiv 2411.09009.
    """
    check_arguments(hidden, head, targets, candidates, temperature)
    serving = _resolve(implementation, hidden, head, targets, candidates, vocab_axis)
    return serving.token_stats(hidden, head, targets, candidates, temperature=temperature, vocab_axis=vocab_axis)


def unsupported_reason(
    implementation: str,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, "tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    vocab_axis: str | None = None,
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can. ValueError for an unknown name."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if vocab_axis is not None and vocab_axis not in manual:
        return (
            f"vocab_axis={vocab_axis!r} is not a manual mesh axis here ({_listed(manual)}): call inside jax.shard_map"
        )
    return _find(implementation).unsupported_reason(hidden, head, targets, candidates, vocab_axis)


def _resolve(name, hidden, head, targets, candidates, vocab_axis) -> Implementation:
    tried = [_find(name)] if name is not None else [i for i in IMPLEMENTATIONS if i.automatic]
    reasons = []
    for implementation in tried:
        reason = unsupported_reason(implementation.name, hidden, head, targets, candidates, vocab_axis=vocab_axis)
        if reason is None:
            return implementation
        reasons.append(f"{implementation.name}: {reason}")
    raise ValueError("token_stats cannot be served here by " + "; ".join(reasons))


def _find(name: str) -> Implementation:
    for implementation in IMPLEMENTATIONS:
        if implementation.name == name:
            return implementation
    names = [i.name for i in IMPLEMENTATIONS]
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(f"implementation={name!r} is unknown; nearest: {nearest!r}, all: {_listed(names)}, or None")


def check_arguments(hidden, head, targets, candidates, temperature):
    if isinstance(temperature, jax.core.Tracer) or not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature={temperature} must be a finite Python number above 0, static under jit; "
            "for greedy sampling at temperature 0 score the policy at 1.0"
        )
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1] or 0 in (*hidden.shape, *head.shape):
        raise ValueError(
            f"hidden {hidden.shape} and head {head.shape} must be [T, D] and [V, D] of the same D, none of them 0: "
            "flatten the batch, and transpose a head stored as [D, V]"
        )
    if hidden.dtype != head.dtype or hidden.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"hidden is {hidden.dtype} and head {head.dtype}; both must be float32 or both bfloat16: cast one"
        )
    for name, ids, ndim in (("targets", targets, 1), ("candidates", candidates, 2)):
        if ids is None:
            continue
        if ids.ndim != ndim or ids.shape[0] != hidden.shape[0] or not jnp.issubdtype(ids.dtype, jnp.signedinteger):
            wanted = "[T]" if ndim == 1 else "[T, K]"
            raise ValueError(
                f"{name} {ids.dtype}{list(ids.shape)} must be signed integers {wanted} with T = {hidden.shape[0]}"
            )


def _listed(names) -> str:
    return ", ".join(repr(n) for n in names) or "none"
