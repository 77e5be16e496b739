"""The gated delta rule of rows that devices share, against rows on one device: values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.delta_rule import causal_convolution, delta_rule

from rlx.models.sharded_recurrence import sharded_convolution, sharded_delta_rule
from rlx.parallel.layout import parse_layout
from rlx.parallel.mesh import Placement, make_mesh

# Segments that cross ranks (of 4), one that spans a whole rank, ones that begin where a rank does, padding at the end.
SEGMENTS = np.array([[1] * 3 + [2] * 11 + [3] * 2, [1] * 4 + [2] * 5 + [0] * 7], np.int32)


def placed(layout: str) -> Placement:
    return Placement(make_mesh(parse_layout(layout)), parse_layout(layout))


def compared(ours, plain, arguments):
    """Largest differences of outputs and of the gradients of a weighted sum, over their size."""

    def both(run):
        weights = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(run, *arguments).shape))
        loss = lambda *x: (run(*x) * weights).sum()  # noqa: E731
        return jax.jit(run)(*arguments), *jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)

    pairs = zip(both(ours), both(plain), strict=True)
    return [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("layout, channels", [("CP4", False), ("TP2 CP2 DP2", True), ("TP2 DP2", True)])
def test_a_rule_over_ranks(layout, channels):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        query, key = (jnp.asarray(random.normal(size=(2, 16, 2, 3))) for _ in range(2))
        key /= jnp.linalg.norm(key, axis=-1, keepdims=True)
        value = jnp.asarray(random.normal(size=(2, 16, 4, 5)))
        decay = jnp.asarray(-random.uniform(0.01, 1, size=(2, 16, 4, 3) if channels else (2, 16, 4)))
        beta = jnp.asarray(random.uniform(size=(2, 16, 4)))
        ids = jnp.asarray(SEGMENTS)
        ours = lambda *x: sharded_delta_rule(placed(layout), *x, ids)  # noqa: E731
        plain = lambda *x: delta_rule(*x, segment_ids=ids).output  # noqa: E731
        assert max(compared(ours, plain, (query, key, value, decay, beta))) < 1e-12


@pytest.mark.parametrize("layout", ["CP4", "TP2 CP2 DP2", "TP2 DP2"])
def test_a_convolution_over_ranks(layout):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, weight = jnp.asarray(random.normal(size=(2, 16, 6))), jnp.asarray(random.normal(size=(6, 4)))
        ids = jnp.asarray(SEGMENTS)
        ours = lambda *x: sharded_convolution(placed(layout), *x, ids)  # noqa: E731
        plain = lambda *x: causal_convolution(*x, segment_ids=ids).output  # noqa: E731
        assert max(compared(ours, plain, (x, weight))) < 1e-12


def test_a_part_shorter_than_the_filter_is_refused():
    run = partial(sharded_convolution, placed("CP8"))
    with pytest.raises(ValueError, match="CP8 leaves a device 2 tokens of a row, and a convolution reads 3"):
        run(jnp.zeros((2, 16, 6)), jnp.zeros((6, 4)), jnp.asarray(SEGMENTS))
