"""Tokens cut over tp between products: values, gradients, and where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlx.parallel.layout import parse_layout
from rlx.parallel.mesh import Placement, make_mesh
from rlx.parallel.sequence import embedded, gathered, scattered

ROWS, TOKENS, WIDTH, HIDDEN, VOCAB = 4, 8, 16, 6, 12
LAYOUT = "TP2 CP2 DP2"


def placed(text: str = LAYOUT, *, over_tp: bool = True) -> Placement:
    return Placement(make_mesh(parse_layout(text)), parse_layout(text), sequence_parallel=over_tp)


def cut(placement: Placement, x: np.ndarray, *axes) -> jax.Array:
    return jax.device_put(x, NamedSharding(placement.mesh, PartitionSpec(*axes)))


def test_a_column_and_a_row_parallel_product_between_tokens_that_are_cut():
    placement, random = placed(), np.random.default_rng(0)
    x, up, down, weights = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((ROWS, TOKENS, HIDDEN), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (ROWS, TOKENS, HIDDEN))
    )

    def loss(x, up, down, on):
        y = scattered(on, jnp.tanh(gathered(on, x) @ up) @ down)
        return (y * weights).sum(), y

    given = (cut(placement, x, "dp", ("cp", "tp")), cut(placement, up, None, "tp"), cut(placement, down, "tp"))
    of = lambda on: jax.jit(jax.value_and_grad(lambda *a: loss(*a, on), (0, 1, 2), has_aux=True))  # noqa: E731
    (_, y), gradients = of(placement)(*given)
    (_, wanted), plain = of(None)(x, up, down)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    for own, other in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)
    for of_tokens in (y, gradients[0]):  # an eighth with each device
        assert {s.data.shape for s in of_tokens.addressable_shards} == {(ROWS // 2, TOKENS // 4, HIDDEN)}


def test_without_it_nothing_moves():
    x = jnp.ones((ROWS, TOKENS, HIDDEN))
    for placement in (None, placed(over_tp=False), placed("CP2 DP4")):
        assert gathered(placement, x) is x
        assert scattered(placement, x) is x


def test_an_embedding_whose_vocabulary_is_cut():
    placement, random = placed(), np.random.default_rng(0)
    table = random.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    tokens = random.integers(VOCAB, size=(ROWS, TOKENS)).astype(np.int32)
    weights = random.normal(size=(ROWS, TOKENS, HIDDEN)).astype(np.float32)
    found = jax.jit(lambda t, ids: embedded(placement, t, ids))(cut(placement, table, "tp"), tokens)
    np.testing.assert_array_equal(found, table[tokens])
    assert {s.data.shape for s in found.addressable_shards} == {(ROWS // 2, TOKENS // 4, HIDDEN)}
    of = lambda look: jax.jit(jax.grad(lambda t: (look(t) * weights).sum()))(table)  # noqa: E731
    gradient = of(lambda t: embedded(placement, t, jnp.asarray(tokens)))
    np.testing.assert_allclose(gradient, of(lambda t: t[tokens]), rtol=1e-5, atol=1e-6)
