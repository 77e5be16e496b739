"""What every implementation of the log-prob head must satisfy, on one device: values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.logprob_suite import ENTRIES, Case, assert_stats, case_for, entries, expected


@entries()
@pytest.mark.parametrize("tokens, vocab, k", [(1, 7, 3), (13, 101, 4), (10, 2, 0), (11, 1, 1)])
def test_values(entry, tokens, vocab, k):
    case = case_for(entry, tokens=tokens, vocab=vocab, k=k)
    assert_stats(jax.jit(entry.call)(*case), expected(case), atol=3e-6)


@entries("reference", "xla_small_tiles", "mosaic")
@pytest.mark.parametrize("vocab", [151_936, 248_320])
def test_values_of_whole_vocabularies(entry, vocab):
    """Small logits: nearly flat, so that a column that is left out or counted twice would be seen."""
    case = case_for(entry, tokens=3, vocab=vocab, scale=0.1)
    assert_stats(jax.jit(entry.call)(*case), expected(case), atol=3e-6)


@entries()
@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4])
def test_values_of_small_and_huge_logits(entry, scale):
    case = case_for(entry, scale=scale)
    assert_stats(jax.jit(entry.call)(*case), expected(case), atol=3e-6 * max(scale, 1))


@entries()
def test_temperature_divides_the_logits(entry):
    case = case_for(entry, scale=2.0)
    assert_stats(jax.jit(functools.partial(entry.call, temperature=0.7))(*case), expected(case, 0.7), atol=3e-6)


@entries()
def test_columns_of_minus_infinity_have_no_probability(entry):
    """Products that overflow to -inf, in columns of their own; the others are as if these were not there."""
    wide, narrow = with_overflow(case_for(entry, vocab=40))
    assert_stats(jax.jit(entry.call)(*wide), expected(narrow), atol=3e-6)


def with_overflow(case: Case) -> tuple[Case, Case]:
    """(the case with 40 columns of -inf behind its own, the case whose hidden states cause them)"""
    hidden = case.hidden.at[:, 0].set(1e20)
    head = case.head.at[:, 0].set(0)
    overflowing = jnp.zeros_like(head).at[:, 0].set(-1e20)
    wide = Case(hidden, jnp.concatenate([head, overflowing]), case.targets, case.candidates)
    return wide, wide._replace(head=head)


@entries()
def test_ids_outside_the_vocabulary_give_nan_at_their_place_only(entry):
    case = case_for(entry)
    bad = case._replace(targets=case.targets.at[2].set(101), candidates=case.candidates.at[3, 1].set(-1))
    out, whole = jax.jit(entry.call)(*bad), jax.jit(entry.call)(*case)
    assert np.flatnonzero(np.isnan(out.logprob)).tolist() == [2]
    assert np.argwhere(np.isnan(out.candidate_logprobs)).tolist() == [[3, 1]]
    np.testing.assert_array_equal(out.entropy, whole.entropy)
    np.testing.assert_array_equal(out.logsumexp, whole.logsumexp)


@entries()
def test_no_candidates_change_nothing_else(entry):
    case = case_for(entry)
    out = jax.jit(lambda *x: entry.call(*x, None))(*case[:3])
    assert out.candidate_logprobs is None
    for x, y in zip(out[:3], expected(case), strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@functools.cache
def every_logprob(name):
    """All log-probs of 6 tokens over 17 ids, as candidates."""
    ids = jnp.broadcast_to(jnp.arange(17), (6, 17))
    return jax.jit(lambda hidden, head: ENTRIES[name].call(hidden, head, ids[:, 0], ids))


@pytest.mark.parametrize("name", [n for n in ENTRIES if n != "mosaic"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-3, 2.5))
def test_the_statistics_are_those_of_one_distribution(name, seed, exponent):
    case = case_for(ENTRIES[name], tokens=6, vocab=17, scale=10**exponent, seed=seed)
    out = every_logprob(name)(*case[:2])
    logprobs = np.asarray(out.candidate_logprobs, np.float64)
    np.testing.assert_allclose(np.exp(logprobs).sum(1), 1, rtol=1e-3)
    np.testing.assert_allclose(out.entropy, -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(out.logprob, out.candidate_logprobs[:, 0])
    assert (logprobs <= 1e-6).all()
