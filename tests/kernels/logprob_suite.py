"""What the tests of the log-prob head share: implementations, cases, the truth in float64, and how close is close."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import TokenStats, fused, mosaic, token_stats, xla
from rlx_kernels.logprob.core import Backend
from rlx_kernels.logprob.tiling import Tile

OUTPUTS = ("logprob", "logsumexp", "entropy", "candidate_logprobs")
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]
# 13 tokens are no multiple of 5 nor 101 columns of 32: every loop has a last step of another size
SMALL_TILES = Backend(xla.moments, xla.d_logits, lambda tokens, vocab, backward: Tile(5, 32))


class Entry(NamedTuple):
    """An implementation, and what it is tried on."""

    call: Callable[..., TokenStats]  # (hidden, head, targets, candidates, *, temperature, vocab_axis)
    dtype: Any = jnp.float32
    width: int = 8
    tolerance: float = 2e-5  # of gradients, relative to the largest
    remat: bool = True  # the interpreter's side effects cannot be rematerialised


def xla_small_tiles(*args, temperature=1.0, vocab_axis=None):
    return xla.token_stats(
        *args, temperature=temperature, vocab_axis=vocab_axis, precision="float32", backend=SMALL_TILES
    )


def interpreted_mosaic(*args, temperature=1.0, vocab_axis=None):
    return mosaic.token_stats(
        *args, temperature=temperature, vocab_axis=vocab_axis, precision="bfloat16", interpret=True
    )


ENTRIES: dict[str, Entry] = {
    "reference": Entry(functools.partial(token_stats, implementation="reference")),
    "xla": Entry(functools.partial(token_stats, implementation="xla")),
    "xla_small_tiles": Entry(xla_small_tiles),
    "xla_bfloat16": Entry(functools.partial(token_stats, implementation="xla"), jnp.bfloat16, tolerance=1e-2),
    "mosaic": Entry(interpreted_mosaic, jnp.bfloat16, width=64, tolerance=1e-2, remat=False),
}
SLOW = frozenset({"mosaic"})  # seconds a case


def entries(*without: str):
    """Parameters `entry` of a test: every implementation but those."""
    marks = {name: [pytest.mark.slow] if name in SLOW else [] for name in ENTRIES}
    return pytest.mark.parametrize(
        "entry",
        [pytest.param(e, id=name, marks=marks[name]) for name, e in ENTRIES.items() if name not in without],
    )


class Case(NamedTuple):
    hidden: jax.Array
    head: jax.Array
    targets: jax.Array
    candidates: jax.Array


def make_case(tokens=13, vocab=101, width=8, k=4, scale=1.0, dtype=jnp.float32, seed=0) -> Case:
    """Logits of standard deviation `scale`.

    Row 0's candidates hold its target, those of row 1 do not, the last row's repeat one id, and all rows share one.
    """
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)) * scale, dtype)
    head = jnp.asarray(rng.normal(size=(vocab, width)) / np.sqrt(width), dtype)
    targets = rng.integers(0, vocab, tokens)
    candidates = rng.integers(0, vocab, (tokens, k))
    candidates[:, :1] = vocab // 2
    targets[1:2] = vocab - 1
    candidates[1:2] = np.arange(k) % max(vocab - 1, 1)
    candidates[0, -1:] = targets[0]
    candidates[-1, :] = candidates[0, :1]
    return Case(hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(candidates, jnp.int32))


def case_for(entry: Entry, **options) -> Case:
    return make_case(**{"width": entry.width, "dtype": entry.dtype} | options)


def dense64(hidden, head, targets, candidates, temperature=1.0):
    logits = hidden @ head.T / temperature
    top = logits.max(1, keepdims=True)
    logsumexp = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    logprobs = logits - logsumexp
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    picked = np.take_along_axis(logprobs, np.concatenate([np.asarray(targets)[:, None], candidates], 1), 1)
    return picked[:, 0], logsumexp[:, 0], entropy, picked[:, 1:]


def expected(case: Case, temperature=1.0):
    """The four statistics in float64, by numpy."""
    hidden, head = (np.asarray(x.astype(jnp.float32), np.float64) for x in (case.hidden, case.head))
    return dense64(hidden, head, case.targets, case.candidates, temperature)


def cotangents(case: Case, subset=range(4), seed=7):
    """A random cotangent for the outputs in `subset`, zeros for the others."""
    rng, tokens = np.random.default_rng(seed), case.targets.shape
    shapes = (tokens, tokens, tokens, case.candidates.shape)
    drawn = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    return tuple(g if i in subset else jnp.zeros_like(g) for i, g in enumerate(drawn))


def weighted_sum(stats: TokenStats, weights):
    return sum((x * g).sum() for x, g in zip(stats, weights, strict=True))


def gradients(call, case: Case, weights, temperature=1.0):
    """(d hidden, d head) of the sum of the outputs times `weights`."""

    def total(hidden, head):
        return weighted_sum(call(hidden, head, case.targets, case.candidates, temperature=temperature), weights)

    return jax.jit(jax.grad(total, (0, 1)))(case.hidden, case.head)


def exact_gradients(case: Case, weights, temperature=1.0):
    """Those of the dense definition, differentiated by jax in float32."""
    exact = case._replace(hidden=case.hidden.astype(jnp.float32), head=case.head.astype(jnp.float32))
    return gradients(ENTRIES["reference"].call, exact, weights, temperature)


def assert_stats(got, wanted, atol):
    for name, x, y in zip(OUTPUTS, got, wanted, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol, err_msg=name)


def assert_close(got, wanted, tolerance=2e-5):
    """Relative to the largest entry of each array."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 1e-6))


def token_loss_in_chunks_of_5(loss_fn, *args, temperature=1.0, vocab_axis=None):
    return fused.token_loss(
        loss_fn, *args, temperature=temperature, vocab_axis=vocab_axis, precision="float32", chunk=5
    )
