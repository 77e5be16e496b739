"""What every implementation of the log-prob head must satisfy, on one device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlx_kernels.logprob import TokenStats, token_stats, xla

IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": functools.partial(token_stats, implementation="reference"),
    "xla": functools.partial(token_stats, implementation="xla"),
    "xla_chunks_of_5": lambda *args, temperature=1.0: xla.token_stats(
        *args, temperature=temperature, vocab_axis=None, chunk=5
    ),
}
OUTPUTS = ("logprob", "logsumexp", "entropy", "candidate_logprobs")
SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(range(4), n)]

every_implementation = pytest.mark.parametrize("stats", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
every_other = pytest.mark.parametrize("name", [n for n in IMPLEMENTATIONS if n != "reference"])


class Case(NamedTuple):
    hidden: jax.Array
    head: jax.Array
    targets: jax.Array
    candidates: jax.Array


def make_case(tokens=13, vocab=101, width=8, k=4, scale=1.0, dtype=jnp.float32, seed=0) -> Case:
    """Logits of standard deviation `scale`. Row 0's candidates hold its target, the last row's repeat one id."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)) * scale, dtype)
    head = jnp.asarray(rng.normal(size=(vocab, width)) / np.sqrt(width), dtype)
    targets = rng.integers(0, vocab, tokens)
    candidates = rng.integers(0, vocab, (tokens, k))
    candidates[0, -1:] = targets[0]
    candidates[-1, :] = candidates[0, :1]
    return Case(hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(candidates, jnp.int32))


def expected(case: Case, temperature=1.0):
    """The four statistics in float64, by numpy."""
    hidden, head = (np.asarray(x.astype(jnp.float32), np.float64) for x in (case.hidden, case.head))
    return dense64(hidden, head, case.targets, case.candidates, temperature)


def dense64(hidden, head, targets, candidates, temperature=1.0):
    logits = hidden @ head.T / temperature
    top = logits.max(1, keepdims=True)
    logsumexp = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    logprobs = logits - logsumexp
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    picked = np.take_along_axis(logprobs, np.concatenate([np.asarray(targets)[:, None], candidates], 1), 1)
    return picked[:, 0], logsumexp[:, 0], entropy, picked[:, 1:]


def assert_stats(got, wanted, atol):
    for name, x, y in zip(OUTPUTS, got, wanted, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol, err_msg=name)


def cotangents(case: Case, subset=range(4), seed=7):
    """A random cotangent for the outputs in `subset`, zeros for the others."""
    rng, tokens = np.random.default_rng(seed), case.targets.shape
    shapes = (tokens, tokens, tokens, case.candidates.shape)
    drawn = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    return tuple(g if i in subset else jnp.zeros_like(g) for i, g in enumerate(drawn))


def gradients(stats, case: Case, given_cotangents, temperature=1.0):
    """(d hidden, d head) of the sum of the outputs times their cotangents."""

    def total(hidden, head):
        out = stats(hidden, head, case.targets, case.candidates, temperature=temperature)
        return sum((x * g).sum() for x, g in zip(out, given_cotangents, strict=True))

    return jax.jit(jax.grad(total, (0, 1)))(case.hidden, case.head)


def assert_close(got, wanted, tolerance=2e-5):
    """Relative to the largest entry of each array."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 1e-6))


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens, vocab, k", [(1, 7, 3), (13, 101, 4), (10, 2, 0), (11, 1, 1)])
def test_values(stats, dtype, tokens, vocab, k):
    case = make_case(tokens, vocab, k=k, dtype=dtype)
    assert_stats(jax.jit(stats)(*case), expected(case), atol=3e-6)


@every_implementation
@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_values_of_small_and_huge_logits(stats, scale):
    case = make_case(scale=scale)
    assert_stats(jax.jit(stats)(*case), expected(case), atol=3e-6 * max(scale, 1))


@every_implementation
def test_temperature_divides_the_logits(stats):
    case = make_case(scale=2.0)
    assert_stats(jax.jit(functools.partial(stats, temperature=0.7))(*case), expected(case, 0.7), atol=3e-6)


@every_implementation
def test_ties_are_uniform(stats):
    case = make_case(vocab=101)._replace(head=jnp.ones((101, 8)))
    out = jax.jit(stats)(*case)
    np.testing.assert_allclose(out.logprob, -np.log(101), rtol=1e-5)
    np.testing.assert_allclose(out.candidate_logprobs, -np.log(101), rtol=1e-5)
    np.testing.assert_allclose(out.entropy, np.log(101), rtol=1e-5)
    d_hidden, d_head = gradients(stats, case, cotangents(case, [2]))
    np.testing.assert_allclose(d_hidden, 0, atol=1e-5)  # the entropy is at its maximum
    np.testing.assert_allclose(d_head, 0, atol=1e-5)


@pytest.fixture(scope="module", params=[n for n in IMPLEMENTATIONS if n != "reference"])
def pullbacks(request):
    """(gradients of an implementation, those of dense autodiff), each compiled once for any cotangents."""
    case = make_case()

    def pullback(name):
        call = jax.jit(lambda g: jax.vjp(lambda a, b: tuple(IMPLEMENTATIONS[name](a, b, *case[2:])), *case[:2])[1](g))
        return lambda subset: call(cotangents(case, subset))

    return pullback(request.param), pullback("reference")


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "+".join(OUTPUTS[i] for i in s))
def test_gradients_of_every_subset_of_outputs(pullbacks, subset):
    got, wanted = (pullback(subset) for pullback in pullbacks)
    assert_close(got, wanted)


@functools.cache
def gradients_of_one(name, output):
    case = make_case()
    weights = cotangents(case)[output]

    def total(hidden, head):
        return (IMPLEMENTATIONS[name](hidden, head, *case[2:])[output] * weights).sum()

    return jax.jit(jax.grad(total, (0, 1)))(*case[:2])


@every_other
@pytest.mark.parametrize("output", range(4), ids=OUTPUTS)
def test_gradients_of_one_output_alone(name, output):
    """The others are not read at all: their cotangents are symbolic zeros."""
    assert_close(gradients_of_one(name, output), gradients_of_one("reference", output))


@every_implementation
@pytest.mark.parametrize("argument", [0, 1], ids=["hidden", "head"])
def test_gradients_agree_with_finite_differences(stats, argument):
    case, step = make_case(), 1e-5
    weights = [np.asarray(g, np.float64) for g in cotangents(case)]
    direction = np.random.default_rng(3).normal(size=case[argument].shape)

    def total(sign):
        arrays = [np.asarray(x, np.float64) for x in case[:2]]
        arrays[argument] = arrays[argument] + sign * step * direction
        out = dense64(arrays[0], arrays[1], case.targets, case.candidates)
        return sum((x * g).sum() for x, g in zip(out, weights, strict=True))

    wanted = (total(1) - total(-1)) / (2 * step)
    got = (np.asarray(gradients(stats, case, cotangents(case))[argument], np.float64) * direction).sum()
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@every_other
@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_gradients_of_small_and_huge_logits(name, scale):
    case = make_case(scale=scale)
    wanted = gradients(IMPLEMENTATIONS["reference"], case, cotangents(case))
    assert_close(gradients(IMPLEMENTATIONS[name], case, cotangents(case)), wanted, tolerance=1e-4)


@every_implementation
def test_gradients_at_another_temperature(stats):
    case = make_case()
    cooled = case._replace(hidden=case.hidden / 0.7)
    d_hidden, d_head = gradients(stats, cooled, cotangents(case))
    assert_close(gradients(stats, case, cotangents(case), temperature=0.7), (d_hidden / 0.7, d_head))


@every_implementation
def test_gradients_in_bfloat16(stats):
    case = make_case(dtype=jnp.bfloat16)
    exact = case._replace(hidden=case.hidden.astype(jnp.float32), head=case.head.astype(jnp.float32))
    wanted = gradients(IMPLEMENTATIONS["reference"], exact, cotangents(case))
    got = gradients(stats, case, cotangents(case))
    assert [x.dtype for x in got] == [jnp.bfloat16] * 2
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), got), wanted, tolerance=1e-2)


@every_implementation
def test_columns_of_minus_infinity_have_no_probability_and_no_nan(stats):
    """Products that overflow to -inf; the other columns are as if these were not there."""
    case = make_case(vocab=20)
    hidden = case.hidden.at[:, 0].set(1e20)
    head = jnp.concatenate([case.head.at[:, 0].set(0), jnp.zeros((2, 8)).at[:, 0].set(-1e20)])
    wide = Case(hidden, head, case.targets, case.candidates)
    narrow = wide._replace(head=head[:20])
    assert_stats(jax.jit(stats)(*wide), expected(narrow), atol=3e-6)
    got, wanted = (gradients(stats, c, cotangents(case)) for c in (wide, narrow))
    assert_close((got[0][:, 1:], got[1][:20, 1:]), (wanted[0][:, 1:], wanted[1][:, 1:]))
    assert all(np.isfinite(x).all() for x in got)


@every_implementation
def test_ids_outside_the_vocabulary_give_nan_at_their_place_only(stats):
    case = make_case()
    bad = case._replace(targets=case.targets.at[2].set(101), candidates=case.candidates.at[3, 1].set(-1))
    out, whole = jax.jit(stats)(*bad), jax.jit(stats)(*case)
    assert np.flatnonzero(np.isnan(out.logprob)).tolist() == [2]
    assert np.argwhere(np.isnan(out.candidate_logprobs)).tolist() == [[3, 1]]
    np.testing.assert_array_equal(out.entropy, whole.entropy)
    np.testing.assert_array_equal(out.logsumexp, whole.logsumexp)


@every_implementation
def test_no_candidates_change_nothing_else(stats):
    case = make_case()
    out = jax.jit(lambda *x: stats(*x, None))(*case[:3])
    assert out.candidate_logprobs is None
    for x, y in zip(out[:3], expected(case), strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@every_implementation
def test_remat_and_scan_over_micro_batches(stats):
    """The shape of a training step: the head's gradient summed over a scan of rematerialised losses."""
    cases = [make_case(seed=s) for s in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)

    def loss(hidden, head, case):
        out = stats(hidden, head, case.targets, case.candidates)
        return sum((x * g).sum() for x, g in zip(out, cotangents(cases[0]), strict=True))

    def scanned(hidden, head):
        body = jax.checkpoint(lambda total, x: (total + loss(x[0], head, x[1]), None))
        return jax.lax.scan(body, 0.0, (hidden, stacked))[0]

    got = jax.jit(jax.grad(scanned, (0, 1)))(stacked.hidden, cases[0].head)
    rows = [gradients(IMPLEMENTATIONS["reference"], c._replace(head=cases[0].head), cotangents(c)) for c in cases]
    assert_close(got, (jnp.stack([r[0] for r in rows]), sum(r[1] for r in rows)))


@functools.cache
def every_logprob(name):
    """All log-probs of 6 tokens over 17 ids, as candidates."""
    ids = jnp.broadcast_to(jnp.arange(17), (6, 17))
    return jax.jit(lambda hidden, head: IMPLEMENTATIONS[name](hidden, head, ids[:, 0], ids))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-3, 2.5))
def test_the_statistics_are_those_of_one_distribution(name, seed, exponent):
    case = make_case(6, 17, scale=10**exponent, seed=seed)
    out = every_logprob(name)(*case[:2])
    logprobs = np.asarray(out.candidate_logprobs, np.float64)
    np.testing.assert_allclose(np.exp(logprobs).sum(1), 1, rtol=1e-3)
    np.testing.assert_allclose(out.entropy, -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(out.logprob, out.candidate_logprobs[:, 0])
    assert (logprobs <= 1e-6).all()
