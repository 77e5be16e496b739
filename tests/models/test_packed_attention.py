"""The update's attention against the plain one, value and gradient, with prefixes, padding and grouped heads."""

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models.layers import packed_causal_mask
from rlx.models.packed_attention import packed_attention

# A prompt of 3 tokens with two responses, a sequence of its own, two tokens of padding.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 3, 4, 4, 4, 0, 0]])
PREFIXES = jnp.array([[0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]])
POSITIONS = jnp.array([[0, 1, 2, 3, 4, 3, 0, 1, 2, 0, 1]])


def attention(query, key, value, allowed):
    """Softmax over all scores; a query that may see nothing gets zeros."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("rqhd,rshd->rhqs", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("rhqs,rshd->rqhd", jnp.where(allowed[:, None], weights, 0), value)


def test_value_and_gradient_are_those_of_the_plain_attention():
    rng = np.random.default_rng(0)
    query, key, value, mixing = (jnp.asarray(rng.normal(size=(1, 11, heads, 8)), jnp.float32) for heads in (6, 2, 2, 6))
    allowed = packed_causal_mask(POSITIONS, SEGMENTS, PREFIXES)

    def run(function):
        total = lambda q, k, v: (mixing * function(q, k, v, allowed)).sum()  # noqa: E731
        return function(query, key, value, allowed), jax.grad(total, argnums=(0, 1, 2))(query, key, value)

    got, wanted = run(packed_attention), run(attention)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    assert not got[0][:, 9:].any()


def test_a_response_sees_its_prompt_and_not_the_other_response():
    allowed = packed_causal_mask(POSITIONS, SEGMENTS, PREFIXES)[0]
    assert np.flatnonzero(allowed[4]).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(allowed[5]).tolist() == [0, 1, 2, 5]
    assert np.flatnonzero(allowed[7]).tolist() == [6, 7]
    assert not allowed[9:].any()
    assert not allowed[:, 9:].any()
