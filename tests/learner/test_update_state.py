"""What an update does to the state: applied, skipped, donated; and that it is compiled once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from rlx.learner.state import init_state, make_optimizer
from rlx.learner.step import add_slice, apply, update, zero_total
from rlx.parallel.runtime import CompilationCounter
from tests import tiny_model
from tests.learner import batches
from tests.learner.batches import CENTRED, LEARNER, LORA, TRAJECTORIES
from tests.tiny_model import ARCH

OPTIMIZER = make_optimizer(LEARNER)


@pytest.fixture(scope="module")
def frozen():
    return tiny_model.params()


@pytest.fixture(scope="module")
def good():
    return batches.batch()


@pytest.fixture
def state(frozen):
    return init_state(ARCH, LORA, frozen, OPTIMIZER, jax.random.key(0))


def step(state, frozen, batch):
    new, scalars, metrics = update(CENTRED, OPTIMIZER, state, frozen, batch)
    return new, jax.device_get(scalars), metrics


def poisoned(value):
    """A batch with one advantage of `value`."""
    chosen = [dataclasses.replace(TRAJECTORIES[0], advantage=value), *TRAJECTORIES[1:]]
    return batches.batch(chosen)


def assert_identical(got, wanted):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def counters(state):
    return int(state.version), int(state.skipped), int(state.skipped_in_row)


def test_the_first_step_of_a_fresh_adapter(state, frozen, good):
    """A has no gradient while B is 0, so AdamW only decays it; B goes by one learning rate against its gradient."""
    before = jax.device_get(state.trainable)
    new, scalars, _ = step(state, frozen, good)
    after = jax.device_get(new.trainable)
    assert counters(new) == (1, 0, 0)
    assert scalars["finite"]
    before_by_path = traverse_util.flatten_dict(before)
    for path, leaf in traverse_util.flatten_dict(after).items():
        if path[-1] == "a":
            np.testing.assert_allclose(leaf, before_by_path[path] * (1 - 1e-2 * 0.1), rtol=1e-6)
            continue
        moved = np.abs(leaf - before_by_path[path])
        assert 0.9e-2 < np.quantile(moved, 0.9) <= 1.0001e-2
    change = jax.tree.map(lambda x, y: ((x - y) ** 2).sum(), after, before)
    assert scalars["update_norm"] == pytest.approx(np.sqrt(sum(jax.tree.leaves(change))), rel=1e-4)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_update_that_is_not_finite_changes_nothing(state, frozen, good, value):
    state, *_ = step(state, frozen, good)
    before = jax.device_get(state)
    new, scalars, _ = step(state, frozen, poisoned(value))
    assert counters(new) == (1, 1, 1)
    assert_identical((new.trainable, new.optimizer), (before.trainable, before.optimizer))
    assert not scalars["finite"]
    assert scalars["update_norm"] == 0
    assert not np.isfinite(scalars["loss"])


def test_a_weight_that_is_not_finite_is_noticed(state, frozen, good):
    broken = {**frozen, "final_norm": frozen["final_norm"].at[3].set(jnp.nan)}
    before = jax.device_get(state)
    new, scalars, _ = step(state, broken, good)
    assert counters(new) == (0, 1, 1)
    assert not scalars["finite"]
    assert_identical(new.trainable, before.trainable)


def test_a_step_that_overflows_the_weights_is_not_made(frozen, good):
    optimizer = optax.sgd(1e38)
    fresh = init_state(ARCH, LORA, frozen, optimizer, jax.random.key(0))
    before = jax.device_get(fresh.trainable)
    new, scalars, _ = update(CENTRED, optimizer, fresh, frozen, good)
    assert np.isfinite(scalars["grad_norm"])
    assert not scalars["finite"]
    assert counters(new) == (0, 1, 1)
    assert_identical(new.trainable, before)


def test_a_gradient_that_overflows_is_noticed_though_the_loss_is_finite(state, frozen):
    """The squares in its norm are beyond float32."""
    new, scalars, _ = step(state, frozen, poisoned(1e25))
    assert np.isfinite(scalars["loss"])
    assert not np.isfinite(scalars["grad_norm"])
    assert counters(new) == (0, 1, 1)


def test_recovery_goes_on_as_if_nothing_had_been(state, frozen, good):
    """The optimizer's own counter included; the total of skipped updates stays."""
    undisturbed, *_ = step(init_state(ARCH, LORA, frozen, OPTIMIZER, jax.random.key(0)), frozen, good)
    undisturbed, *_ = step(undisturbed, frozen, good)
    for batch, wanted in [
        (poisoned(np.inf), (0, 1, 1)),
        (poisoned(np.nan), (0, 2, 2)),
        (good, (1, 2, 0)),
        (poisoned(np.inf), (1, 3, 1)),
        (good, (2, 3, 0)),
    ]:
        state, *_ = step(state, frozen, batch)
        assert counters(state) == wanted
    assert_identical((state.trainable, state.optimizer), (undisturbed.trainable, undisturbed.optimizer))


def test_the_state_is_donated_and_the_model_is_not(state, frozen, good):
    new, *_ = step(state, frozen, good)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, frozen, good)))


def test_nothing_is_compiled_for_other_numbers_of_samples(state, frozen, good):
    state, _, metrics = step(state, frozen, good)
    metrics.values()
    compiled = lambda: [f._cache_size() for f in (zero_total, add_slice, apply)]  # noqa: E731
    programs, compilations = compiled(), CompilationCounter()
    used = set()
    for count in range(1, len(TRAJECTORIES) + 1):
        packed = batches.packed(TRAJECTORIES[:count] + TRAJECTORIES[:count])
        used.add(packed.num_micro_batches)
        state, scalars, metrics = step(state, frozen, batches.device_batch(packed))
        metrics.values()
        assert scalars["finite"]
    assert used >= {1, 2, 3}
    assert compiled() == programs
    assert compilations.count == 0
    assert jax.jit(lambda x: x * 41 + count)(2) == 89  # the counter counts
    assert compilations.count > 0
