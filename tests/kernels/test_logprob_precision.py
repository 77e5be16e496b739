"""The precision of the head's products: what each setting rounds, that it reaches every product, what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import token_loss, token_stats, unsupported_reason
from rlx_kernels.logprob.precision import PRECISIONS, product, resolve

from tests.kernels.logprob_suite import assert_close, cotangents, exact_gradients, expected, make_case, weighted_sum

# of a value or gradient, relative to the largest: 8, 16 and 24 bits of mantissa
ERROR = {"bfloat16": (2e-4, 2e-2), "bfloat16_3x": (1e-8, 1e-4), "float32": (0, 3e-6)}


def by_statistics(case, weights, precision):
    def loss(hidden, head):
        return weighted_sum(token_stats(hidden, head, *case[2:], precision=precision), weights)

    return loss


def in_the_forward_pass(case, weights, precision):
    def loss(hidden, head):
        return token_loss(weighted_sum, hidden, head, *case[2:], weights, precision=precision)[0]

    return loss


def error(got, wanted):
    return max(
        float(np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max())
        for x, y in zip(jax.tree.leaves(got), map(np.asarray, jax.tree.leaves(wanted)), strict=True)
    )


@pytest.mark.parametrize("precision", ERROR)
def test_values_have_the_bits_of_their_precision(precision):
    case = make_case(width=64)
    got = jax.jit(lambda *x: token_stats(*x, precision=precision))(*case)
    least, most = ERROR[precision]
    assert least <= error(got, expected(case)) <= most


@pytest.mark.parametrize("precision", ERROR)
@pytest.mark.parametrize("loss", [by_statistics, in_the_forward_pass])
def test_gradients_have_the_bits_of_their_precision(loss, precision):
    case = make_case(width=64)
    weights = cotangents(case)
    got = jax.jit(jax.grad(loss(case, weights, precision), (0, 1)))(*case[:2])
    least, most = ERROR[precision]
    assert least <= error(got, exact_gradients(case, weights)) <= most


@pytest.mark.parametrize("precision, dots", [("bfloat16", 1), ("bfloat16_3x", 3), ("float32", 1)])
def test_every_product_is_in_that_precision(precision, dots):
    """Logits, logits again, two gradients; three products for each where operands are split."""
    case = make_case()
    text = str(jax.make_jaxpr(jax.grad(by_statistics(case, cotangents(case), precision), (0, 1)))(*case[:2]))
    operands = "bf16[" if "bfloat16" in precision else "f32["
    lines = [line for line in text.splitlines() if "dot_general[" in line or "= dot_general" in line]
    assert len(lines) == 4 * dots
    assert "preferred_element_type=float32" in text
    assert operands in text
    assert ("HIGHEST" in text) == (precision == "float32")


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_three_products_of_bfloat16_have_sixteen_bits(scale):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(40, 64)), jnp.float32) for _ in range(2))
    got = jax.jit(lambda a, b: product(a, b, 1, 1, "bfloat16_3x"))(a * scale, b)
    wanted = np.asarray(a * jnp.float32(scale), np.float64) @ np.asarray(b, np.float64).T
    assert 1e-9 < error(got, wanted) < 1e-5


def test_an_operand_that_is_bfloat16_already_saves_a_product():
    a, b = jnp.ones((2, 3)), jnp.ones((4, 3), jnp.bfloat16)
    count = lambda *x: str(jax.make_jaxpr(lambda *y: product(*y, 1, 1, "bfloat16_3x"))(*x)).count("dot_general[")  # noqa: E731
    assert (count(a, b), count(b, b)) == (2, 1)


def test_an_fp32_head_over_bfloat16_weights():
    """Hidden states that are not rounded after the last norm, a head in bfloat16: no other rounding."""
    case = make_case(width=64)
    case = case._replace(head=case.head.astype(jnp.bfloat16))
    weights = cotangents(case)
    value = jax.jit(token_stats)(*case)
    assert error(value, expected(case)) < 3e-6
    d_hidden, d_head = jax.jit(jax.grad(by_statistics(case, weights, None), (0, 1)))(*case[:2])
    assert (d_hidden.dtype, d_head.dtype) == (jnp.float32, jnp.bfloat16)
    wanted = exact_gradients(case, weights)
    assert_close(d_hidden, wanted[0])
    assert_close(d_head, wanted[1], 1e-2)


def test_the_dtypes_decide_where_nothing_is_asked_for():
    single, half = jnp.ones((1, 1)), jnp.ones((1, 1), jnp.bfloat16)
    assert [resolve(None, *x) for x in [(half, half), (single, half), (half, single), (single, single)]] == [
        "bfloat16",
        "float32",
        "float32",
        "float32",
    ]
    assert resolve("bfloat16_3x", half, half) == "bfloat16_3x"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU can")
def test_tensorfloat32_is_refused_where_there_is_none():
    case = make_case()
    with pytest.raises(ValueError, match=r"xla: precision='tensorfloat32' is a number format of NVIDIA GPUs.*'cpu'"):
        token_stats(*case, precision="tensorfloat32")
    with pytest.raises(ValueError, match="tensorfloat32"):
        token_loss(weighted_sum, *case, cotangents(case), precision="tensorfloat32")


def test_the_dense_definition_has_the_precisions_that_are_number_formats():
    with jax.enable_x64(True):
        served = [p for p in PRECISIONS if unsupported_reason("reference", *make_case(), precision=p) is None]
    assert served == ["bfloat16", "float32", "float64"]


def test_float64_needs_the_types_of_64_bits():
    with pytest.raises(ValueError, match="needs jax's 64-bit types"):
        token_stats(*make_case(), precision="float64")
