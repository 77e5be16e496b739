"""Every objective that a configuration can name keeps the loss contract of `contract.py`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx.algos.objective import objective
from tests.algos import contract
from tests.algos.contract import (
    CHOICES,
    SLICES,
    assert_same,
    covering_objectives,
    draw_batch,
    draw_layout,
    evaluate,
    plain_layout,
)
from tests.oracle_adapter import base_objective

OBJECTIVES = covering_objectives()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def chosen(config, key):
    section, _, name = key.rpartition(".")
    return getattr(config.distill if section else config, name)


def name(config):
    return "-".join(str(chosen(config, key)) for key in CHOICES if chosen(config, key) not in (CHOICES[key][0], "off"))


@pytest.mark.parametrize("config", OBJECTIVES, ids=name)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), used=st.integers(1, SLICES))
def test_any_layout_and_any_poison_give_the_same(config, seed, used):
    """Plain; any micro-batch count, packing, padding and order; only the trained tokens; each with poison too."""
    rng = np.random.default_rng(seed)
    batch = draw_batch(config, seed)
    layout = draw_layout(rng, used)
    trained = np.where(np.asarray(batch.targets.mask)[layout], layout, -1)
    layouts = jnp.asarray([plain_layout(), layout, draw_layout(rng, SLICES), trained])
    poison = jnp.asarray([False, rng.random() < 0.5, True, True])
    outcomes = jax.vmap(lambda layout, poison: evaluate(config, batch, layout, poison))(layouts, poison)
    plain, *others = [jax.tree.map(lambda x, i=i: x[i], outcomes) for i in range(len(layouts))]
    assert np.isfinite(plain.loss)
    assert np.isfinite(plain.gradient).all()
    for other in others:
        assert_same(other, plain)


def few_first(configs):
    """Parameters: those that together have every single choice, then the others, marked as slow."""
    seen, parameters = set(), []
    for config in configs:
        choices = {(key, chosen(config, key)) for key in CHOICES}
        marks = [pytest.mark.slow] if choices <= seen else []
        seen |= choices
        parameters.append(pytest.param(config, id=name(config), marks=marks))
    return parameters


@pytest.mark.parametrize("config", few_first(OBJECTIVES))
def test_data_parallel_devices_give_the_same(config, devices8):
    batch, clean = draw_batch(config, seed=3), jnp.asarray(False)
    layout = jnp.asarray(draw_layout(np.random.default_rng(3), SLICES))
    mesh = Mesh(np.asarray(devices8), "dp")
    placed = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("dp",), ())]
    # Compiling is all the time this takes; what is computed stays the same.
    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(partial(evaluate, config), in_shardings=placed, compiler_options=options)
    parallel = compiled(batch, layout, clean)
    assert_same(parallel, evaluate(config, batch, jnp.asarray(plain_layout()), clean))


def per_slice_mean(config, stats, targets):
    """The bug that this field's trainers have most often: every slice is averaged by its own count."""
    count = jnp.maximum(targets.mask.sum(), 1)
    return objective(config, stats, dataclasses.replace(targets, weights=jnp.where(targets.mask, 1 / count, 0)))


def multiplied_mask(config, stats, targets):
    """Masking by multiplication, without a `where` before the mathematics."""
    loss, metrics = objective(config, stats, targets)
    return loss + jnp.sum(targets.mask.astype(float) * stats.logprob), metrics


@pytest.mark.parametrize("wrong", [per_slice_mean, multiplied_mask])
def test_the_kit_sees_the_usual_mistakes(wrong, monkeypatch):
    config = base_objective()
    batch, layout = draw_batch(config, seed=5), jnp.asarray(draw_layout(np.random.default_rng(5), SLICES))
    monkeypatch.setattr(contract, "objective", wrong)
    plain = evaluate(config, batch, jnp.asarray(plain_layout()), jnp.asarray(False))
    with pytest.raises(AssertionError):
        assert_same(evaluate(config, batch, layout, jnp.asarray(True)), plain)


def test_the_covering_objectives_have_every_choice():
    for key, values in CHOICES.items():
        assert {chosen(config, key) for config in OBJECTIVES} == set(values), key
