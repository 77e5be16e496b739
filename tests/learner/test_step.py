"""The update against a plain dense computation in float64, whatever the packing."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlx.learner.state import init_state
from rlx.learner.step import compile_update, update
from rlx.models.spec import Params
from rlx.parallel.runtime import CompilationCounter
from tests import tiny_model
from tests.learner import batches, dense
from tests.learner.batches import CENTRED, LORA, PLAIN, TRAJECTORIES
from tests.tiny_model import ARCH

# Its state is the last gradient, so that an update hands out what it would otherwise only act on.
RECORDER = optax.trace(decay=0.0)
NO_LORA = dataclasses.replace(LORA, rank=0)


def fresh_state(config, optimizer=RECORDER):
    """An adapter with both factors away from zero, or the tiny model."""
    lora = NO_LORA if config.adapter_scale is None else LORA
    state = init_state(ARCH, lora, tiny_model.params(), optimizer, jax.random.key(0))
    if config.adapter_scale is None:
        return state
    drawn = jax.tree.map(lambda x: np.random.default_rng(x.size).normal(size=x.shape) * 0.1, state.trainable)
    return state.replace(trainable=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn))


def run(config, batch):
    """(loss, gradient, metric values, scalars) of one update."""
    state, scalars, metrics = update(config, RECORDER, fresh_state(config), tiny_model.params(), batch)
    return jax.device_get((scalars["loss"], state.optimizer.trace, scalars)), metrics.values()


@partial(jax.jit, static_argnums=0)
def dense_value_and_gradient(config, trainable, frozen, rows):
    objective = config.objective
    cap = objective.tis_cap if objective.loss == "tis" else None

    def loss(trainable: Params):
        full = (
            trainable if config.adapter_scale is None else dense.with_adapter(frozen, trainable, config.adapter_scale)
        )
        logp = dense.log_softmax(ARCH, full, rows.tokens, config.temperature)
        losses = dense.token_losses(logp, rows, cap, objective.entropy_coefficient)
        weights = dense.token_weights(rows.mask, objective.aggregation)
        return jnp.where(rows.mask, weights * losses, 0).sum(), logp

    return jax.value_and_grad(loss, has_aux=True)(trainable)


def oracle(config):
    """(loss, gradient, log p of every token) in float64, each trajectory in a row of its own."""
    trainable, frozen = jax.device_get((fresh_state(config).trainable, tiny_model.params()))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (trainable, frozen))
        (loss, logp), gradient = dense_value_and_gradient(config, *wide, dense.rows(TRAJECTORIES, 20))
        return jax.device_get((loss, gradient, logp))


@pytest.fixture(scope="module")
def centred():
    return oracle(CENTRED)


@pytest.fixture(scope="module")
def plain():
    return oracle(PLAIN)


def assert_update(got, wanted):
    loss, gradient, scalars = got
    assert loss == pytest.approx(wanted[0], rel=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())
        assert np.abs(y).max() > 1e-4
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(wanted[1])))
    assert scalars["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert scalars["finite"]


@pytest.mark.parametrize(
    "layout", ["narrow", *(pytest.param(n, marks=pytest.mark.slow) for n in ("one row", "at once"))]
)
def test_adapter_update_is_the_dense_one_in_any_layout(centred, layout):
    """Three, two and one micro-batches of two, one and eight rows; three of the sequences share their first tokens."""
    got, values = run(CENTRED, batches.batch(layout=layout))
    assert_update(got, centred)
    check_metrics(values, centred[2])


def check_metrics(values, logp):
    """Those that need the model, by numpy."""
    rows = [(i, t, t.mask) for i, t in enumerate(TRAJECTORIES)]
    own = np.concatenate([logp[i, np.flatnonzero(m), t.tokens[m]] for i, t, m in rows])
    every = np.concatenate([logp[i, np.flatnonzero(m)] for i, t, m in rows])
    sampler = np.concatenate([t.logprobs[m] for _, t, m in rows])
    ages = np.concatenate([t.ages[m] for _, t, m in rows])
    ratio = np.exp(own - sampler)
    wanted = {
        "policy/entropy": -(np.exp(every) * every).sum(1).mean(),
        "policy/logprob_mean": own.mean(),
        "offpolicy/ratio_mean": ratio.mean(),
        "offpolicy/ess": ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(),
        "offpolicy/truncated_fraction": (ratio > 2).mean(),
        "offpolicy/logprob_gap_max": np.abs(own - sampler).max(),
        "offpolicy/age_mean": ages.mean(),
        "offpolicy/ess_age_0": ratio[ages == 0].sum() ** 2 / (ages == 0).sum() / (ratio[ages == 0] ** 2).sum(),
    }
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=2e-4)


def test_full_update_is_the_dense_one(plain):
    """Every parameter is trained; no head is stored."""
    got, values = run(PLAIN, batches.batch(head=False))
    assert_update(got, plain)
    assert "centering/drift_norm" not in values


def test_order_and_number_of_micro_batches_do_not_matter(plain):
    """Reversed trajectories lie in other rows; a batch spread over twice the micro-batches gives the same."""
    reversed_, _ = run(PLAIN, batches.batch(TRAJECTORIES[::-1], head=False))
    assert_update(reversed_, plain)
    whole = batches.packed(TRAJECTORIES, head=False)
    assert whole.num_micro_batches == 2
    spread = {}
    for field in dataclasses.fields(whole):
        if isinstance(array := getattr(whole, field.name), np.ndarray):
            spread[field.name] = wide = np.zeros((4, *array.shape[1:]), array.dtype)
            wide[:, 1] = array.reshape(4, *array.shape[2:])
    got, _ = run(PLAIN, batches.device_batch(dataclasses.replace(whole, **spread)))
    assert_update(got, plain)


def test_padding_may_hold_anything(plain):
    """NaN and infinities where the mask is off, tokens, positions and prefixes where the segment is 0."""
    noisy = batches.packed(TRAJECTORIES, head=False)
    empty, off = noisy.segment_ids == 0, ~noisy.mask
    noisy.tokens[empty], noisy.positions[empty] = 77, 5
    noisy.advantages[off], noisy.sampler_logprobs[off] = np.nan, np.inf
    noisy.target_tokens[off], noisy.sequences[off], noisy.ages[off], noisy.source[off] = 99, 3, -4, 23
    noisy.prefix_ids[empty], noisy.lengths[off] = 1, -2
    got, values = run(PLAIN, batches.device_batch(noisy))
    assert_update(got, plain)
    assert all(np.isfinite(v) for v in values.values())


def test_an_empty_batch_has_no_loss_and_no_gradient():
    (loss, gradient, scalars), _ = run(PLAIN, batches.batch([], head=False))
    assert loss == 0
    assert scalars["finite"]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("config", [CENTRED, PLAIN], ids=["adapter", "full"])
def test_half_precision_models_are_trained_in_float32(config):
    """Nothing but shapes is computed."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_model.params())
    state = init_state(ARCH, NO_LORA if config.adapter_scale is None else LORA, half, RECORDER, jax.random.key(0))
    run_it = partial(update, dataclasses.replace(config, dtype="bfloat16"), RECORDER)
    new, scalars, _ = jax.eval_shape(run_it, state, half, batches.batch(head=config is CENTRED))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert {x.dtype for x in jax.tree.leaves((new.trainable, new.optimizer))} == {jnp.dtype("float32")}
    assert scalars["loss"].dtype == jnp.float32


@pytest.mark.parametrize("config", [CENTRED, PLAIN], ids=["adapter", "everything"])
def test_an_update_compiled_ahead_compiles_nothing(config):
    """From a batch of padding, for one of several micro-batches."""
    config = dataclasses.replace(config, temperature=0.7)  # no other test has compiled it
    state, params, padding = fresh_state(config), tiny_model.params(), batches.batch([])
    compile_update(config, RECORDER, state, params, padding[0])
    batch, compilations = batches.batch(), CompilationCounter()
    state, *_ = update(config, RECORDER, state, params, batch)
    assert len(batch) > len(padding)
    assert int(state.version) == 1
    assert compilations.count == 0
