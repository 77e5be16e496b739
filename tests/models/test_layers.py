"""The shared layers against their definitions in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models import rope
from rlx.models.description import Rope
from rlx.models.layers import packed_causal_mask, rms_norm
from rlx.models.packed_attention import packed_attention
from rlx.models.weights import Weights, project

RNG = np.random.default_rng(0)


def turned(x, positions, **kind):
    kind = Rope(**{"theta": 1e4, "dim": x.shape[-1]} | kind)
    return rope.apply(kind, x, rope.tables(kind, positions))


def linear(x, layer, adapter=None, scale=1.0):
    return project(Weights({"name": layer}, {} if adapter is None else {"name": adapter}, scale), "name", x)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rms_norm(scale):
    x, weight = scale * normal(2, 3, 16), normal(16)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-6), wanted, rtol=2e-6, atol=1e-6)


def test_rms_norm_of_half_precision_is_taken_in_float32():
    """1 + 2^-10 is 1 in bfloat16: a mean of squares taken there would miss it."""
    x = jnp.full((1, 512), 300.0, jnp.bfloat16).at[0, 0].set(0)
    normed = rms_norm(x, jnp.ones(512, jnp.bfloat16), 0.0)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(normed[0, 1:], jnp.asarray(np.sqrt(512 / 511), jnp.bfloat16))


# -------------------------------------------------------------------------------------------------------------- rotary


def test_rope_turns_half_split_pairs():
    """Dimension i and i + d/2 are the real and imaginary part of a number turned by position · theta^(-2i/d)."""
    x, positions, theta = normal(2, 5, 3, 8), RNG.integers(0, 500, (2, 5)), 1e4
    numbers = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * theta ** (-np.arange(4) / 4))
    wanted = np.concatenate([numbers.real, numbers.imag], -1)
    got = jax.jit(turned)(jnp.asarray(x), jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(got, wanted, atol=2e-4)  # 500 radians in float32
    part = turned(jnp.asarray(np.concatenate([x, x], -1)), jnp.asarray(positions, jnp.int32), dim=8)
    np.testing.assert_allclose(part, np.concatenate([wanted, x], -1), atol=2e-4)
    side_by_side = np.stack([x[..., :4], x[..., 4:]], -1).reshape(x.shape)
    pairs = turned(jnp.asarray(side_by_side), jnp.asarray(positions, jnp.int32), interleaved=True)
    np.testing.assert_allclose(pairs, wanted, atol=2e-4)


def test_rope_makes_products_depend_on_distance_alone():
    query, key = jnp.asarray(normal(1, 1, 1, 8)), jnp.asarray(normal(1, 1, 1, 8))

    def product(i, j):
        pair = [turned(x, jnp.array([[at]], jnp.int32)) for x, at in ((query, i), (key, j))]
        return float((pair[0] * pair[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3
    np.testing.assert_array_equal(turned(query, jnp.zeros((1, 1), jnp.int32)), query)


# -------------------------------------------------------------------------------------------------------------- linear


def test_linear_with_bias_and_adapter():
    x, kernel, bias, a, b = normal(2, 3, 4), normal(4, 5), normal(5), normal(4, 2), normal(2, 5)
    plain = linear(jnp.asarray(x), {"kernel": jnp.asarray(kernel)})
    np.testing.assert_allclose(plain, x @ kernel, atol=1e-5)
    layer = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    both = linear(jnp.asarray(x), layer, {"a": jnp.asarray(a), "b": jnp.asarray(b)}, 0.5)
    np.testing.assert_allclose(both, x @ kernel + bias + 0.5 * (x @ a @ b), atol=1e-5)


def test_wide_adapter_keeps_the_dtype_of_the_weights():
    x, layer = jnp.ones((1, 4), jnp.bfloat16), {"kernel": jnp.ones((4, 5), jnp.bfloat16)}
    y = linear(x, layer, {"a": jnp.ones((4, 2)), "b": jnp.full((2, 5), 2.0**-5)}, 1.0)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.full((1, 5), 4.25, jnp.bfloat16))


# ----------------------------------------------------------------------------------------------------------- attention


def dense_attention(query, key, value, allowed):
    """One head at a time, in float64."""
    rows, _, heads, dim = query.shape
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    per_key = heads // key.shape[2]
    for r in range(rows):
        for h in range(heads):
            scores = query[r, :, h].astype(np.float64) @ key[r, :, h // per_key].T / np.sqrt(dim)
            weights = np.where(allowed[r], np.exp(scores - scores.max()), 0)
            total = weights.sum(-1, keepdims=True)
            out[r, :, h] = (
                np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ value[r, :, h // per_key]
            )
    return out


def test_attention_of_grouped_queries():
    """Query heads 0 and 1 share key head 0; a query that may see nothing gets zeros."""
    query, key, value = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 6)
    allowed = RNG.random((2, 7, 7)) < 0.5
    allowed[0, 3] = False
    got = jax.jit(packed_attention)(*(jnp.asarray(x) for x in (query, key, value, allowed)))
    np.testing.assert_allclose(got, dense_attention(query, key, value, allowed), atol=1e-5)
    np.testing.assert_array_equal(got[0, 3], 0)


def test_gradients_of_a_query_that_sees_nothing_are_zero():
    query, key, value = (jnp.asarray(normal(1, 3, 2, 4)) for _ in range(3))
    allowed = jnp.tril(jnp.ones((1, 3, 3), bool)).at[0, 1].set(False)
    total = lambda q, k, v: (packed_attention(q, k, v, allowed) * jnp.arange(1.0, 5.0)).sum()  # noqa: E731
    d_query, d_key, d_value = jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value)
    np.testing.assert_array_equal(d_query[0, 1], 0)
    assert all(bool(jnp.isfinite(d).all()) for d in (d_query, d_key, d_value))
    assert float(jnp.abs(d_value[0, 2]).max()) > 0


def test_packed_causal_mask():
    segment_ids, positions = jnp.array([[1, 1, 1, 2, 2, 0, 0]]), jnp.array([[0, 1, 2, 0, 1, 0, 1]])
    wanted = np.zeros((7, 7), int)
    wanted[:3, :3] = np.tril(np.ones((3, 3)))
    wanted[3:5, 3:5] = np.tril(np.ones((2, 2)))
    np.testing.assert_array_equal(packed_causal_mask(positions, segment_ids)[0], wanted)
