"""Tokens come to their experts and back whatever the layout; what has no room is counted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rlx_kernels.grouped_matmul import grouped_matmul

from rlx.parallel import expert
from rlx.parallel.layout import parse_layout
from rlx.parallel.mesh import Placement, make_mesh

COUNT, WIDTH = 8, 3
RANDOM = np.random.default_rng(0)
MATRICES = RANDOM.normal(size=(COUNT, WIDTH, WIDTH)).astype(np.float32)
TOKENS = RANDOM.normal(size=(4, 6, WIDTH)).astype(np.float32)  # 6 tokens are not a multiple of every cp · tp
GAINS = RANDOM.uniform(size=(4, 6, 2)).astype(np.float32)
CHOICES = RANDOM.integers(COUNT + 1, size=(4, 6, 2)).astype(np.int32)  # COUNT is no expert


def exchanged(layout: str, capacity: float = 1.0):
    parsed = parse_layout(layout)
    placement = dataclasses.replace(Placement(make_mesh(parsed), parsed), expert_capacity=capacity)
    cut = PartitionSpec(parsed.expert_axes)
    return jax.jit(lambda m, x, g: expert.run(placement, grouped, m, cut, x, jnp.asarray(CHOICES), g, COUNT))


def grouped(matrices, rows, sizes):
    return grouped_matmul(rows, matrices, sizes)


def plain(matrices, x, gains):
    every = jnp.einsum("rti,eio->rteo", x, jnp.concatenate([matrices, jnp.zeros((1, WIDTH, WIDTH))]))
    return (jnp.take_along_axis(every, jnp.asarray(CHOICES)[..., None], axis=2) * gains[..., None]).sum(axis=2)


@pytest.mark.parametrize("layout", ["TP2 DP2", "TP2 CP2 DP2 EP4", "CP2 DP4 EP8"])
def test_tokens_come_to_their_experts(layout):
    given = MATRICES, TOKENS, GAINS
    run = exchanged(layout)
    y, dropped = run(*given)
    np.testing.assert_allclose(y, plain(*given), rtol=1e-5, atol=1e-5)
    assert dropped == 0
    ours, theirs = (
        jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), (0, 1, 2))(*given) for f in (lambda *x: run(*x)[0], plain)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_has_no_room_is_counted_and_adds_nothing():
    y, dropped = exchanged("TP2 CP2 DP2 EP4", capacity=0.1)(MATRICES, TOKENS, GAINS)
    assert 0 < dropped < (CHOICES < COUNT).sum()
    assert float(jnp.abs(y).sum()) < float(jnp.abs(plain(MATRICES, TOKENS, GAINS)).sum())
