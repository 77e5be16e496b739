"""What every implementation of the log-prob head must satisfy, on one device: gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.logprob_suite import (
    ENTRIES,
    OUTPUTS,
    SLOW,
    SUBSETS,
    assert_close,
    case_for,
    cotangents,
    dense64,
    entries,
    exact_gradients,
    gradients,
    weighted_sum,
)
from tests.kernels.test_logprob_conformance import with_overflow

OTHERS = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in ENTRIES if n != "reference"]


@pytest.fixture(scope="module", params=OTHERS)
def pullback(request):
    """(entry, gradients of any cotangents), compiled once."""
    entry = ENTRIES[request.param]
    case = case_for(entry)
    call = jax.jit(lambda g: jax.vjp(lambda a, b: tuple(entry.call(a, b, *case[2:])), *case[:2])[1](g))
    return entry, case, lambda subset: call(cotangents(case, subset))


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "+".join(OUTPUTS[i] for i in s))
def test_gradients_of_every_subset_of_outputs(pullback, subset):
    entry, case, call = pullback
    got = call(subset)
    assert [x.dtype for x in got] == [entry.dtype] * 2
    assert_close(got, exact_gradients_of(case.hidden.shape[1], str(case.hidden.dtype), subset), entry.tolerance)


@functools.cache
def exact_pullback(width, dtype):
    case = case_for(ENTRIES["reference"], width=width, dtype=dtype)
    exact = [x.astype(jnp.float32) for x in case[:2]]
    call = ENTRIES["reference"].call
    return case, jax.jit(lambda g: jax.vjp(lambda a, b: tuple(call(a, b, *case[2:])), *exact)[1](g))


def exact_gradients_of(width, dtype, subset):
    case, call = exact_pullback(width, dtype)
    return call(cotangents(case, subset))


@entries("reference", "mosaic")
@pytest.mark.parametrize("output", range(4), ids=OUTPUTS)
def test_gradients_of_one_output_alone(entry, output):
    """The others are not read at all: their cotangents are symbolic zeros."""
    case = case_for(entry)
    weights = cotangents(case)[output]

    def total(hidden, head):
        return (entry.call(hidden, head, *case[2:])[output] * weights).sum()

    got = jax.jit(jax.grad(total, (0, 1)))(*case[:2])
    assert_close(got, exact_gradients_of(entry.width, str(case.hidden.dtype), [output]), entry.tolerance)


@entries()
@pytest.mark.parametrize("argument", [0, 1], ids=["hidden", "head"])
def test_gradients_agree_with_finite_differences(entry, argument):
    case, step = case_for(entry), 1e-5
    weights = [np.asarray(g, np.float64) for g in cotangents(case)]
    arrays = [np.asarray(x.astype(jnp.float32), np.float64) for x in case[:2]]
    direction = np.random.default_rng(3).normal(size=case[argument].shape)

    def total(sign):
        moved = [x + sign * step * direction if i == argument else x for i, x in enumerate(arrays)]
        return weighted_sum(dense64(*moved, case.targets, case.candidates), weights)

    wanted = (total(1) - total(-1)) / (2 * step)
    got = (np.asarray(gradients(entry.call, case, cotangents(case))[argument], np.float64) * direction).sum()
    np.testing.assert_allclose(got, wanted, rtol=max(1e-4, 3 * entry.tolerance))


@entries("reference")
@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_gradients_of_small_and_huge_logits(entry, scale):
    case = case_for(entry, scale=scale)
    wanted = exact_gradients(case, cotangents(case))
    assert_close(gradients(entry.call, case, cotangents(case)), wanted, max(1e-4, entry.tolerance))


@entries("reference", "xla_small_tiles", "mosaic")
def test_gradients_over_a_whole_vocabulary(entry):
    case = case_for(entry, tokens=2, vocab=151_936, scale=0.1)
    assert_close(
        gradients(entry.call, case, cotangents(case)), exact_gradients(case, cotangents(case)), entry.tolerance
    )


@entries()
def test_the_gradient_at_a_certain_target_is_summed_before_it_is_rounded(entry):
    """p - 1 at a target of probability 0.9998: of two numbers rounded to bfloat16 it would be ten times that."""
    case = case_for(entry, k=0)
    direction = jnp.ones(entry.width, entry.dtype)
    hidden = jnp.tile(direction, (13, 1))
    head = jnp.zeros_like(case.head).at[7].set(direction * jnp.asarray(13.0 / entry.width, entry.dtype))
    certain = case._replace(hidden=hidden, head=head, targets=jnp.full(13, 7, jnp.int32))
    weights = (jnp.ones(13), *cotangents(certain, [])[1:])
    _, d_head = gradients(entry.call, certain, weights)
    _, wanted = exact_gradients(certain, weights)
    assert_close(d_head[7], wanted[7], 2e-2)
    assert float(abs(wanted[7]).max()) < 0.01


@entries()
def test_gradients_at_another_temperature(entry):
    case = case_for(entry)
    got = gradients(entry.call, case, cotangents(case), temperature=0.7)
    assert_close(got, exact_gradients(case, cotangents(case), temperature=0.7), entry.tolerance)


@entries()
def test_ties_are_uniform(entry):
    case = case_for(entry)
    case = case._replace(head=jnp.ones_like(case.head))
    out = jax.jit(entry.call)(*case)
    for x in (out.logprob, out.candidate_logprobs, -out.entropy):
        np.testing.assert_allclose(x, -np.log(101), rtol=1e-5)
    for gradient in gradients(entry.call, case, cotangents(case, [2])):
        np.testing.assert_allclose(np.asarray(gradient, np.float32), 0, atol=1e-5)  # the entropy is at its maximum


@entries()
def test_columns_of_minus_infinity_bring_no_nan_into_a_gradient(entry):
    wide, narrow = with_overflow(case_for(entry, vocab=40))
    got, wanted = (gradients(entry.call, c, cotangents(c)) for c in (wide, narrow))
    assert_close((got[0][:, 1:], got[1][:40, 1:]), (wanted[0][:, 1:], wanted[1][:, 1:]), entry.tolerance)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in got)


@entries("reference")
def test_ids_outside_the_vocabulary_have_no_gradient(entry):
    """As in the dense definition: their NaN is no function of the logits, and all the rest is as without them."""
    case = case_for(entry)
    bad = case._replace(targets=case.targets.at[2].set(101), candidates=case.candidates.at[3, 1].set(-1))
    weights = cotangents(case)
    without = (weights[0].at[2].set(0), *weights[1:3], weights[3].at[3, 1].set(0))
    got = gradients(entry.call, bad, weights)
    assert_close(got, exact_gradients(case, without), entry.tolerance)
    assert_close(got, exact_gradients(bad, weights), entry.tolerance)


@entries()
def test_remat_and_scan_over_micro_batches(entry):
    """The shape of a training step: the head's gradient summed over a scan of rematerialised losses."""
    cases = [case_for(entry, seed=s) for s in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    weights = cotangents(cases[0])

    def scanned(hidden, head):
        def body(total, x):
            hidden, case = x
            return total + weighted_sum(entry.call(hidden, head, case.targets, case.candidates), weights), None

        return jax.lax.scan(jax.checkpoint(body) if entry.remat else body, 0.0, (hidden, stacked))[0]

    got = jax.jit(jax.grad(scanned, (0, 1)))(stacked.hidden, cases[0].head)
    rows = [exact_gradients(c._replace(head=cases[0].head), weights) for c in cases]
    assert_close(got, (jnp.stack([r[0] for r in rows]), sum(r[1] for r in rows)), entry.tolerance)
