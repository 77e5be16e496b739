"""Prompts computed once for their group: the same loss, gradient and metrics as separate rows, in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlx_kernels.logprob import TokenStats

from rlx.data.packing import PackingConfig, pack
from rlx.learner import step
from rlx.models.lora import init_adapter
from rlx.types import RowShape
from tests import tiny_model
from tests.learner import batches
from tests.learner.batches import CENTRED, HEAD, LORA, PLAIN
from tests.tiny_model import ARCH

SHARED = PackingConfig(row_tokens=40, row_targets=40, rows=2, capacity=20, head_size=HEAD)
# Beginnings longer than the place for them, and groups larger than a row.
SHAPED = dataclasses.replace(SHARED, row_tokens=40, row_shape=RowShape(10, 2))
SEPARATE = dataclasses.replace(SHARED, share_prefixes=False)


def group(name, prompt, sizes):
    rng = np.random.default_rng(name)
    own = [batches.trajectory(10 * name + i, size) for i, size in enumerate(sizes)]
    return batches.with_prefix(own, rng.integers(0, ARCH.vocab_size, prompt), name)


# A group of one row, one that is cut, one with responses of a token, some of whose targets are not at their end, and a
# sequence of none.
TRAJECTORIES = [
    *group(1, 9, [(7, 6), (3, 2), (9, 8)]),
    *group(2, 14, [(9, 8), (9, 4), (8, 7), (7, 6), (5, 4)]),
    *group(3, 2, [(2, 1), (2, 1), (6, 3)]),
    batches.trajectory(99, (12, 8)),
]


def dense_stats(hidden, head, targets, candidates, *, temperature, precision, implementation):
    """The output head in float64, whatever the configuration says of it."""
    logits = hidden @ head.T / temperature
    logp = jax.nn.log_softmax(logits)
    ids = targets[:, None] if candidates is None else jnp.concatenate([targets[:, None], candidates], 1)
    picked = jnp.take_along_axis(logp, ids, 1)
    entropy = -(jnp.exp(logp) * logp).sum(1)
    return TokenStats(picked[:, 0], jax.nn.logsumexp(logits, 1), entropy, None if candidates is None else picked[:, 1:])


def sums(config, packing, lora):
    """(loss, gradient, metric sums) of the trajectories, float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(tiny_model.params()))
        trainable = params if lora is None else jax.eval_shape(partial(init_adapter, ARCH, lora), jax.random.key(0))
        rng = np.random.default_rng(0)
        trainable = jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape) + (x if lora is None else 0), trainable)
        widen = lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x  # noqa: E731
        batch = jax.tree.map(widen, batches.device_batch(pack(TRAJECTORIES, packing)))
        return jax.device_get(step.accumulate(config, trainable, params, batch))


@pytest.mark.parametrize("packing, saved", [(SHARED, 0.3), (SHAPED, 0.15)], ids=["anywhere", "shaped"])
@pytest.mark.parametrize(
    "config, lora",
    [
        (CENTRED, LORA),
        (dataclasses.replace(PLAIN, dtype="float64", remat="layer"), None),
    ],
    ids=["adapter", "full"],
)
def test_loss_gradient_and_metrics_are_those_of_separate_rows(monkeypatch, config, lora, packing, saved):
    monkeypatch.setattr(step, "token_stats", dense_stats)
    head = HEAD if config is CENTRED else 0
    shared, separate = (dataclasses.replace(c, head_size=head) for c in (packing, SEPARATE))
    assert pack(TRAJECTORIES, shared).shared_fraction > saved
    assert pack(TRAJECTORIES, separate).shared_fraction == 0
    got, wanted = sums(config, shared, lora), sums(config, separate, lora)
    assert got[0].dtype == np.float64
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    assert len(paths) == len(jax.tree.leaves(got)) > 20
    for x, (path, y) in zip(jax.tree.leaves(got), paths, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-9 * max(1, np.abs(y).max()), err_msg=str(path))
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(wanted[1]))
