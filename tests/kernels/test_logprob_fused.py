"""A loss of the log-prob head whose gradient is taken in the forward pass, against `token_stats` differentiated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import token_loss, token_stats

from tests.kernels.logprob_suite import (
    assert_close,
    cotangents,
    exact_gradients,
    make_case,
    token_loss_in_chunks_of_5,
)

RUNS = {"one_chunk": token_loss, "chunks_of_5": token_loss_in_chunks_of_5}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def arguments(case, seed=3):
    rng = np.random.default_rng(seed)
    drawn = {"advantages": rng.normal(size=case.targets.shape), "head": rng.normal(size=case.candidates.shape)}
    return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()} | {"count": jnp.float32(11)}


def clipped(stats, given):
    """Non-linear in every statistic, over a whole batch's denominator."""
    ratio = jnp.clip(jnp.exp(stats.logprob + 4), 0.5, 2)
    head = (jnp.exp(stats.candidate_logprobs) * given["head"]).sum(-1)
    per_token = -ratio * given["advantages"] + head**2 - 0.1 * stats.entropy + 0.01 * stats.logsumexp**2
    return per_token.sum() / given["count"]


def separately(case, given, temperature=0.8):
    """The same loss of `token_stats`."""
    return lambda hidden, head: clipped(token_stats(hidden, head, *case[2:], temperature=temperature), given)


@functools.cache
def wanted():
    case = make_case()
    return jax.jit(jax.value_and_grad(separately(case, arguments(case)), (0, 1)))(*case[:2])


@every_run
@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1)], ids=["hidden", "head", "both"])
def test_value_and_gradients_are_those_of_the_statistics(run, trained):
    case = make_case()
    given = arguments(case)

    def loss(hidden, head):
        return run(clipped, hidden, head, *case[2:], given, temperature=0.8)

    (value, stats), got = jax.jit(jax.value_and_grad(loss, trained, has_aux=True))(*case[:2])
    np.testing.assert_allclose(value, wanted()[0], rtol=1e-5)
    assert_close(got, [wanted()[1][i] for i in trained])
    assert_close(stats, token_stats(*case, temperature=0.8))


@every_run
def test_the_gradient_follows_the_cotangent_of_the_loss(run):
    case = make_case()
    given = arguments(case)

    def outer(hidden, head):
        return jnp.sin(3 * run(clipped, hidden, head, *case[2:], given, temperature=0.8)[0])

    got = jax.jit(jax.grad(outer, (0, 1)))(*case[:2])
    value, gradients = wanted()
    assert_close(got, [3 * jnp.cos(3 * value) * g for g in gradients])


@every_run
def test_ids_outside_the_vocabulary_have_no_gradient(run):
    case = make_case()
    bad = case._replace(targets=case.targets.at[2].set(101), candidates=case.candidates.at[3, 1].set(-1))
    weights = cotangents(case)
    whole = [(0 * weights[0] + 1).at[2].set(0), (0 * weights[3] + 1).at[3, 1].set(0)]  # 0 where an id is outside

    def loss(stats, given):
        weighted = (x * g for x, g in zip(stats, given, strict=True))
        return sum(x.sum() for x in weighted)

    got = jax.grad(lambda *x: run(loss, *x, *bad[2:], weights)[0], (0, 1))(*case[:2])
    without = (weights[0] * whole[0], *weights[1:3], weights[3] * whole[1])
    assert_close(got, exact_gradients(case, without))


@every_run
def test_micro_batches_in_a_scan_add_up(run):
    cases = [make_case(seed=s) for s in range(3)]
    stacked, given = jax.tree.map(lambda *x: jnp.stack(x), *cases), arguments(cases[0])

    def scanned(hidden, head):
        def body(total, x):
            hidden, case = x
            return total + run(clipped, hidden, head, *case[2:], given, temperature=0.8)[0], None

        return jax.lax.scan(body, 0.0, (hidden, stacked))[0]

    got = jax.jit(jax.grad(scanned, (0, 1)))(stacked.hidden, cases[0].head)
    parts = [jax.grad(separately(c, given), (0, 1))(c.hidden, cases[0].head) for c in cases]
    assert_close(got, (jnp.stack([p[0] for p in parts]), sum(p[1] for p in parts)))


def test_bfloat16_arrays_give_bfloat16_gradients():
    case = make_case(dtype=jnp.bfloat16)
    loss = lambda *x: token_loss(clipped, *x, *case[2:], arguments(case), temperature=0.8)[0]  # noqa: E731
    got = jax.jit(jax.grad(loss, (0, 1)))(*case[:2])
    assert [x.dtype for x in got] == [jnp.bfloat16] * 2
    exact = [x.astype(jnp.float32) for x in case[:2]]
    assert_close(got, jax.grad(separately(case, arguments(case)), (0, 1))(*exact), tolerance=1e-2)


def test_no_gradient_reaches_the_arguments_or_comes_from_the_statistics():
    case = make_case()

    def total(hidden, given):
        loss, stats = token_loss(clipped, hidden, *case[1:], given)
        return 0 * loss + stats.entropy.sum()

    for gradient in jax.tree.leaves(jax.grad(total, (0, 1))(case.hidden, arguments(case))):
        np.testing.assert_array_equal(gradient, 0)


def test_the_loss_may_go_without_candidates_and_arguments():
    case = make_case()
    loss, stats = token_loss(lambda stats, _: -stats.logprob.sum(), *case[:3], None)
    assert stats.candidate_logprobs is None
    np.testing.assert_allclose(loss, -stats.logprob.sum(), rtol=1e-6)


def test_a_loss_per_token_is_refused():
    with pytest.raises(ValueError, match=r"loss_fn gave float32\[13\]; it must sum over its tokens"):
        token_loss(lambda stats, _: stats.logprob, *make_case())


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda stats, _: 3.0, r"loss_fn gave 3\.0, a float; it must return one float32 scalar array"),
        (lambda stats, _: None, "loss_fn gave None, a NoneType"),
        (lambda stats, _: (stats.logprob.sum(), {}), "loss_fn gave .*, a tuple; .*metrics come from the statistics"),
        (lambda stats, _: stats.logprob.sum().astype(jnp.bfloat16), r"loss_fn gave bfloat16\[\]; .*astype"),
    ],
)
def test_a_loss_that_is_no_float32_scalar_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        token_loss(loss_fn, *make_case())


def test_a_loss_that_closes_over_a_differentiated_array_is_refused():
    case = make_case()

    def loss(hidden, scale):
        return token_loss(lambda stats, _: scale * stats.logprob.sum(), hidden, *case[1:])[0]

    with pytest.raises(ValueError, match=r"closes over an array that is differentiated.*pass it in `arguments`"):
        jax.grad(loss, (0, 1))(case.hidden, 2.0)
    assert np.isfinite(jax.jit(jax.grad(loss))(case.hidden, 2.0)).all()  # one that is only traced may be closed over


def test_arguments_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"arguments\['weights'\] has shape \(12,\).*T = 13"):
        token_loss(clipped, *make_case(), {"weights": jnp.ones(12)})
