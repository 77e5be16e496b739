"""Ids of sequences and groups, renumbered."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algos import masked


def test_no_ids_are_no_ids():
    assert masked.dense_ids(jnp.zeros(0, bool), jnp.zeros(0, int)).shape == (0,)


@pytest.mark.parametrize("few", [0, 1024], ids=["sorted", "compared"])
def test_dense_ids_are_equal_where_ids_were(few, monkeypatch):
    monkeypatch.setattr(masked, "_FEW", few)
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids, mask = rng.integers(-3, 10**6, 40)[rng.integers(0, 12, 40)].astype(np.int32), rng.random(40) < 0.7
        dense = np.asarray(masked.dense_ids(jnp.asarray(mask), jnp.asarray(ids)))
        assert set(dense.tolist()) <= set(range(40))
        counted = ids[mask]
        np.testing.assert_array_equal(
            dense[mask][:, None] == dense[mask], counted[:, None] == counted, err_msg=f"{ids}, {mask}"
        )
        assert len(set(dense[~mask].tolist())) <= 1
        assert not set(dense[~mask].tolist()) & set(dense[mask].tolist())
