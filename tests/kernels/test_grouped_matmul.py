"""The grouped product against one float64 product a group in numpy."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from rlx_kernels.grouped_matmul import api, grouped_matmul, unsupported_reason, xla

ROWS, WIDTH, OUT = 41, 6, 5
IMPLEMENTATIONS = {
    "xla": functools.partial(grouped_matmul, implementation="xla"),
    "xla_blocks_of_4": functools.partial(xla.grouped_matmul, block=4),
    "xla_blocks_of_1": functools.partial(xla.grouped_matmul, block=1),
    "ragged_dot": functools.partial(grouped_matmul, implementation="ragged_dot"),
}
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
SIZES = {
    "uneven": [7, 0, 20, 1, 13],
    "first and last empty": [0, 0, 41, 0, 0],
    "all in the last": [0, 0, 0, 0, 41],
    "rows of no group": [4, 9, 0, 8, 3],
    "no rows at all": [0, 0, 0, 0, 0],
    "multiples of a block": [8, 4, 16, 12, 1],
}


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (ROWS, WIDTH), (5, WIDTH, OUT), (ROWS, OUT)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def dense64(x, weights, d_out, sizes):
    """(product, gradient of x, gradient of the weights)"""
    x, weights, d_out = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weights, d_out))
    out, d_x, d_weights = np.zeros(d_out.shape), np.zeros(x.shape), np.zeros(weights.shape)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], d_x[rows] = x[rows] @ weights[group], d_out[rows] @ weights[group].T
        d_weights[group] = x[rows].T @ d_out[rows]
        start += size
    return out, d_x, d_weights


@functools.cache
def with_gradients(name, dtype=jnp.float32):
    """Compiled once for any sizes."""

    def call(x, weights, d_out, sizes):
        out, pullback = jax.vjp(lambda x, w: IMPLEMENTATIONS[name](x, w, sizes), x, weights)
        return (out, *pullback(d_out))

    return jax.jit(call)


def assert_close(got, wanted, tolerance=1e-6):
    for label, x, y in zip(("product", "d_x", "d_weights"), got, wanted, strict=True):
        x = np.asarray(x.astype(jnp.float32))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 1), err_msg=label)


@every_implementation
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(name, sizes):
    given = arrays()
    got = with_gradients(name)(*given, jnp.asarray(sizes, jnp.int32))
    assert_close(got, dense64(*given, sizes))


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, ROWS), min_size=5, max_size=5))
def test_any_sizes(cuts):
    sizes = np.diff([0, *sorted(cuts)])
    given = arrays()
    assert_close(with_gradients("xla_blocks_of_4")(*given, jnp.asarray(sizes, jnp.int32)), dense64(*given, sizes))


@every_implementation
def test_bfloat16_accumulates_in_float32(name):
    given = arrays(jnp.bfloat16)
    got = with_gradients(name, jnp.bfloat16)(*given, jnp.asarray(SIZES["uneven"], jnp.int32))
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    assert_close(got, dense64(*given, SIZES["uneven"]), 5e-3)


def test_many_blocks_of_a_group_add_up_in_float32():
    """In bfloat16 a sum of ones stops at 256."""
    ones = jnp.ones((600, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16), jnp.asarray([600], jnp.int32)
    gradient = jax.grad(lambda w: xla.grouped_matmul(ones[0], w, ones[2], block=2).astype(jnp.float32).sum())(ones[1])
    np.testing.assert_allclose(np.asarray(gradient, np.float32), 600, rtol=4e-3)


@every_implementation
def test_rows_of_no_group_do_not_matter(name):
    x, weights, d_out = arrays()
    sizes = jnp.asarray(SIZES["rows of no group"], jnp.int32)
    beyond = jnp.arange(ROWS)[:, None] >= 24
    poisoned = jnp.where(beyond, 1e30, x)
    got = with_gradients(name)(poisoned, weights, jnp.where(beyond, 1e30, d_out), sizes)
    assert_close(got, dense64(x, weights, d_out, SIZES["rows of no group"]))


@every_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_other_rows_hold_does_not_leak(name, poison):
    """Rows of no group not at all, those of a group only into its own matrix."""
    sizes = SIZES["rows of no group"]
    x, weights, d_out = arrays()
    rows = jnp.arange(ROWS)[:, None]
    bad = (rows >= 24) | (rows == 13)  # the first of group 3; blocks of group 1 read on into it
    if name == "ragged_dot":  # on a CPU it is one dense product: only rows of no group can be kept out
        bad = rows >= 24
    out, d_x, d_weights = with_gradients(name)(
        jnp.where(bad, poison, x), weights, jnp.where(bad, poison, d_out), jnp.asarray(sizes, jnp.int32)
    )
    wanted, d_x_wanted, d_weights_wanted = dense64(x, weights, d_out, sizes)
    good = ~np.asarray(bad)[:24, 0]
    np.testing.assert_allclose(out[:24][good], wanted[:24][good], atol=1e-5)
    np.testing.assert_allclose(d_x[:24][good], d_x_wanted[:24][good], atol=1e-5)
    assert (out[24:] == 0).all()
    assert (d_x[24:] == 0).all()
    groups = np.array([0, 1, 2, 4] if bad[13] else range(5))
    np.testing.assert_allclose(d_weights[groups], d_weights_wanted[groups], atol=1e-5)


@every_implementation
@pytest.mark.parametrize(
    "sizes, meant",
    [
        ([7, 40, 2**31 - 1, 2**31 - 1, 5], [7, 34, 0, 0, 0]),
        ([10, -3, 20, -(2**31), 50], [10, 0, 20, 0, 11]),
    ],
    ids=["too many", "negative"],
)
def test_sizes_beyond_the_rows_are_cut_off(name, sizes, meant):
    given = arrays()
    assert_close(with_gradients(name)(*given, jnp.asarray(sizes, jnp.int32)), dense64(*given, meant))


@pytest.mark.parametrize("dtype, most", [(jnp.int8, 127), (jnp.uint8, 255), (jnp.uint32, 2**32 - 1)])
def test_sizes_of_any_integer_type(dtype, most):
    sizes = xla.bounded(jnp.asarray([100, 100, most], dtype), 300)
    assert sizes.dtype == jnp.int32
    assert sizes.tolist() == [100, 100, 100]


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_float32_ask_for_the_highest_precision(name, dtype):
    x, weights, _ = arrays(dtype)
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    loss = lambda x, w: IMPLEMENTATIONS[name](x, w, sizes).astype(jnp.float32).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weights))
    products = text.count(" dot_general[") + text.count(" ragged_dot_general[")
    assert products == 3
    highest = text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") + text.count("precision=Precision.HIGHEST")
    assert highest == (products if dtype == jnp.float32 else 0)


def test_frozen_weights_have_no_gradient_product():
    x, weights, d_out = arrays()
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    loss = lambda x, w: (xla.grouped_matmul(x, w, sizes) * d_out).sum()  # noqa: E731
    counts = [jax.jit(jax.grad(loss, a)).lower(x, weights).compile().as_text().count(" dot(") for a in (0, (0, 1))]
    assert counts[1] == counts[0] + 1


def test_the_work_is_that_of_the_rows():
    """`jax.lax.ragged_dot` holds every row once for each group, here 64 times."""
    shape = jax.ShapeDtypeStruct
    given = shape((1024, 64), jnp.float32), shape((64, 64, 64), jnp.float32), shape((64,), jnp.int32)

    def temporary_bytes(name):
        loss = lambda x, w, s: IMPLEMENTATIONS[name](x, w, s).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("xla") < 4 << 20
    assert temporary_bytes("ragged_dot") > 16 << 20


def test_experts_over_devices():
    """Each device has its own experts and rows; the gradient of shared rows is summed over the devices."""
    x, weights, _ = arrays()
    mesh = jax.make_mesh((5,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:5])

    def local(x, weights):
        return xla.grouped_matmul(x, weights, jnp.asarray([ROWS], jnp.int32), block=8)[None]

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("ep")), out_specs=PartitionSpec("ep")
    )
    out, pullback = jax.vjp(jax.jit(sharded), x, weights)
    dense_out, dense_pullback = jax.vjp(lambda x, w: jnp.einsum("td,edf->etf", x, w), x, weights)
    np.testing.assert_allclose(out, dense_out, atol=1e-5)
    for got, wanted in zip(pullback(jnp.cos(out)), dense_pullback(jnp.cos(out)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_block_is_about_half_a_group():
    assert [xla.default_block(rows, 16) for rows in (16, 2_048, 16_384, 1 << 20)] == [32, 64, 512, 512]


def test_tokamax_says_why_it_cannot(monkeypatch):
    x, weights, _ = arrays()
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        unsupported_reason("tokamax", x, weights, sizes) == "the package tokamax is not installed: pip install tokamax"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert unsupported_reason("tokamax", x, weights, sizes) == "needs a GPU or a TPU; the default backend is cpu"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "bfloat16, not float32" in str(unsupported_reason("tokamax", x, weights, sizes))
    assert unsupported_reason("tokamax", *(a.astype(jnp.bfloat16) for a in (x, weights)), sizes) is None


def test_none_takes_what_is_made_for_the_platform():
    x, weights, _ = arrays()
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    np.testing.assert_array_equal(grouped_matmul(x, weights, sizes), IMPLEMENTATIONS["xla"](x, weights, sizes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": jnp.zeros((5, 7, 5))}, r"x \(41, 6\) and weights \(5, 7, 5\) must be \[T, D\] and \[E, D, F\]"),
        ({"weights": jnp.zeros((5, 6, 5), jnp.bfloat16)}, "x is float32 and weights bfloat16"),
        ({"group_sizes": jnp.zeros(4, jnp.int32)}, r"group_sizes int32\[4\] must be integers \[E\] with E = 5"),
        ({"group_sizes": jnp.zeros(5)}, r"group_sizes float32\[5\] must be integers"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    x, weights, _ = arrays()
    given = {"x": x, "weights": weights, "group_sizes": jnp.zeros(5, jnp.int32), **changes}
    with pytest.raises(ValueError, match=message):
        api.check_arguments(**given)


@pytest.mark.parametrize("name", ["xla", "ragged_dot", "tokamax"])
def test_a_reason_is_asked_of_arguments_that_fit(name):
    x, weights, _ = arrays()
    with pytest.raises(ValueError, match="x is bfloat16 and weights float32"):
        unsupported_reason(name, x.astype(jnp.bfloat16), weights, jnp.zeros(5, jnp.int32))


@pytest.mark.parametrize(
    "name, message",
    [("raged_dot", "'raged_dot' is unknown; nearest: 'ragged_dot'"), ("tokamax", "served here by tokamax: ")],
)
def test_an_implementation_that_cannot_serve_raises(name, message):
    x, weights, _ = arrays()
    with pytest.raises(ValueError, match=message):
        grouped_matmul(x, weights, jnp.zeros(5, jnp.int32), implementation=name)
