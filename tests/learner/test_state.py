"""Schedules and the optimizer by their formulas, and what a fresh state is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from rlx.learner.state import init_state, learning_rate, make_optimizer
from tests import tiny_model
from tests.learner.batches import LEARNER, LORA
from tests.tiny_model import ARCH

# ------------------------------------------------------------------------------------------------------------ schedules


def rates(steps, **changes):
    schedule = learning_rate(dataclasses.replace(LEARNER, learning_rate=2.0, updates=14, **changes))
    return [float(schedule(step)) for step in steps]


def test_constant():
    assert rates([0, 7, 100]) == [2, 2, 2]


def test_warm_up_is_linear_and_comes_first():
    assert rates(range(6), warmup_updates=4) == pytest.approx([0.5, 1, 1.5, 2, 2, 2])


def test_linear_ends_at_its_fraction_with_the_last_update():
    found = rates([0, 2, 4, 9, 14, 50], schedule="linear", warmup_updates=4, final_learning_rate_fraction=0.1)
    assert found == pytest.approx([0.5, 1.5, 2, 1.1, 0.2, 0.2])


def test_cosine_ends_at_its_fraction_with_the_last_update():
    """final + (1 - final) (1 + cos(π s)) / 2 at s of the way."""
    found = rates([0, 3.5, 7, 14, 50], schedule="cosine", final_learning_rate_fraction=0.2)
    halfway = [0.2 + 0.8 * (1 + np.cos(np.pi * s)) / 2 for s in (0, 0.25, 0.5, 1, 1)]
    assert found == pytest.approx([2 * x for x in halfway])


def test_more_warm_up_than_updates_still_has_a_schedule():
    assert rates([0, 14, 20], schedule="linear", warmup_updates=20) == pytest.approx([0.1, 1.5, 2])


# ------------------------------------------------------------------------------------------------------------ optimizer


def adamw(config, parameter, gradients):
    """arXiv 1711.05101, algorithm 2, after clipping by the global norm; in float64."""
    first = second = np.zeros_like(parameter)
    for t, gradient in enumerate(gradients, 1):
        norm = np.sqrt((gradient**2).sum())
        if config.max_grad_norm:
            gradient = gradient * min(1, config.max_grad_norm / norm)
        first = config.b1 * first + (1 - config.b1) * gradient
        second = config.b2 * second + (1 - config.b2) * gradient**2
        step = first / (1 - config.b1**t) / (np.sqrt(second / (1 - config.b2**t)) + config.eps)
        parameter = parameter - config.learning_rate * (step + config.weight_decay * parameter)
    return parameter


@pytest.mark.parametrize("max_grad_norm, weight_decay", [(1.0, 0.1), (0.0, 0.1), (1.0, 0.0)])
def test_the_optimizer_is_adamw(max_grad_norm, weight_decay):
    """Of four gradients two are clipped. The norm is over all arrays: the parameter comes in two halves."""
    config = dataclasses.replace(LEARNER, max_grad_norm=max_grad_norm, weight_decay=weight_decay, eps=1e-3)
    rng = np.random.default_rng(0)
    parameter = rng.normal(size=8)
    gradients = [scale * rng.normal(size=8) for scale in (0.01, 3, 0.1, 1)]
    optimizer = make_optimizer(config)
    halves = {"a": jnp.asarray(parameter[:3], jnp.float32), "b": jnp.asarray(parameter[3:], jnp.float32)}

    @jax.jit
    def run(halves, gradients):
        state = optimizer.init(halves)
        for g in gradients:
            changes, state = optimizer.update({"a": g[:3], "b": g[3:]}, state, halves)
            halves = jax.tree.map(jnp.add, halves, changes)
        return halves

    got = run(halves, [jnp.asarray(g, jnp.float32) for g in gradients])
    np.testing.assert_allclose(np.concatenate([got["a"], got["b"]]), adamw(config, parameter, gradients), atol=2e-6)


# --------------------------------------------------------------------------------------------------------- fresh states


def test_an_adapter_starts_at_version_0():
    state = init_state(ARCH, LORA, tiny_model.params(), make_optimizer(LEARNER), jax.random.key(0))
    adapter = traverse_util.flatten_dict(state.trainable)
    assert {path[-2] for path in adapter} == set(LORA.targets)
    assert not any(np.any(leaf) for path, leaf in adapter.items() if path[-1] == "b")
    assert [int(x) for x in (state.version, state.skipped, state.skipped_in_row)] == [0, 0, 0]


def test_keys_draw_different_adapters():
    first, again, other = (
        init_state(ARCH, LORA, tiny_model.params(), make_optimizer(LEARNER), jax.random.key(k)).trainable
        for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(first["0"]["mixer"]["q_proj"]["a"], again["0"]["mixer"]["q_proj"]["a"])
    assert not np.array_equal(first["0"]["mixer"]["q_proj"]["a"], other["0"]["mixer"]["q_proj"]["a"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_full_training_starts_from_a_float32_copy(dtype):
    """A copy of its own: the state is donated, the model's parameters must outlive it."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_model.params())
    optimizer = make_optimizer(LEARNER)
    state = init_state(ARCH, dataclasses.replace(LORA, rank=0), params, optimizer, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.trainable)} == {jnp.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, state.trainable, params)
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert jax.tree.leaves(state)[0].is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
