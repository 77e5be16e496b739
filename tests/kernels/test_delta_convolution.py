"""The short causal convolution against numpy: packed rows, states in and out, decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.delta_rule import causal_convolution, causal_convolution_step, convolution

IDS = np.array([[1, 1, 1, 2, 2, 4, 4, 4, 4, 0, 0], [0, 0, 3, 3, 0, 5, 5, 5, 5, 5, 5]], np.int32)


def make_case():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 11, 3)).astype(np.float32), jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)


def by_hand(x, weight, ids, before=None):
    """(output, the last width - 1 inputs), token by token."""
    rows, tokens, channels = x.shape
    weight, count = np.asarray(weight), weight.shape[1] - 1
    out, last = np.zeros(x.shape), np.zeros((rows, count, channels))
    for r in range(rows):
        past = np.zeros((count, channels)) if before is None else before[r]
        for t in range(tokens):
            if ids[r, t] <= 0:
                continue
            if t > 0 and ids[r, t] != ids[r, t - 1]:
                past = np.zeros((count, channels))
            inputs = np.concatenate([past, x[r, t : t + 1]])
            out[r, t] = (inputs * weight.T).sum(axis=0)
            past = inputs[1:]
        last[r] = past
    return out, last


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from a state"])
def test_values_are_those_by_hand(width, given):
    x, weight = make_case()
    weight = weight[:, :width]
    before = np.random.default_rng(1).normal(size=(2, width - 1, 3)) if given else None
    state = None if before is None else jnp.asarray(before, jnp.float32)
    got = jax.jit(causal_convolution)(jnp.asarray(x), weight, segment_ids=jnp.asarray(IDS), initial_state=state)
    for found, wanted in zip(got, by_hand(x, weight, IDS, before), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_gradients_of_packed_rows_are_those_of_separate_ones():
    x, weight = make_case()
    d_out = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)
    loss = lambda x, w, d, ids: (causal_convolution(x, w, segment_ids=ids).output * d).sum()  # noqa: E731
    d_x, d_weight = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(weight), d_out, jnp.asarray(IDS))
    total = np.zeros(weight.shape)
    for row, start, end in ((0, 0, 3), (0, 3, 5), (0, 5, 9), (1, 2, 4), (1, 5, 11)):
        part, ones = (row, slice(start, end)), jnp.ones((1, end - start), jnp.int32)
        alone = jax.grad(loss, (0, 1))(jnp.asarray(x[part])[None], jnp.asarray(weight), d_out[part][None], ones)
        np.testing.assert_allclose(d_x[part], alone[0][0], atol=1e-6)
        total += alone[1]
    np.testing.assert_allclose(d_weight, total, atol=1e-5)
    assert (np.asarray(d_x)[IDS == 0] == 0).all()


def test_nothing_that_padding_holds_matters():
    x, weight = make_case()
    poisoned = np.where((IDS <= 0)[..., None], np.nan, x)
    for found, wanted in zip(
        causal_convolution(jnp.asarray(poisoned), weight, segment_ids=jnp.asarray(IDS)),
        by_hand(x, weight, IDS),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_decoding_goes_on_from_the_state():
    x, weight = make_case()
    whole = causal_convolution(jnp.asarray(x), weight, segment_ids=jnp.ones((2, 11), jnp.int32))
    state = causal_convolution(jnp.asarray(x[:, :2]), weight, segment_ids=jnp.ones((2, 2), jnp.int32)).state
    for t in range(2, 11):
        out, state = causal_convolution_step(jnp.asarray(x[:, t]), weight, state)
        np.testing.assert_allclose(out, whole.output[:, t], atol=1e-6)
    np.testing.assert_array_equal(state, whole.state)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": jnp.zeros((4, 4))}, r"x \(2, 11, 3\) and weight \(4, 4\) must be \[rows, T, C\] and \[C, width\]"),
        ({"segment_ids": jnp.zeros((2, 11))}, r"segment_ids float32\[2, 11\] must be integers \[2, 11\]"),
        ({"initial_state": jnp.zeros((2, 4, 3))}, r"initial_state \(2, 4, 3\) must be \(2, 3, 3\): width - 1 inputs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    x, weight = make_case()
    given = {"x": jnp.asarray(x), "weight": weight, "segment_ids": jnp.asarray(IDS)} | changes
    with pytest.raises(ValueError, match=message):
        convolution.check_arguments(**{"initial_state": None} | given)
