"""Scores of frozen policies, and a transformer that is trained with them to the optimum of Proxy OPD."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlx.algos.objective import objective
from rlx.data.packing import FrozenArray, PackingConfig, Trajectory, pack
from rlx.learner.frozen import SharedIds, frozen_stats, scoring_config
from rlx.learner.state import LearnerState
from rlx.learner.step import slice_stats, update
from rlx.models.lora import init_adapter, merge
from rlx.models.transformer import forward, head_matrix
from tests import tiny_model
from tests.every_token import every_token
from tests.learner import batches
from tests.oracle_adapter import base_objective, dense_stats

ARCH = tiny_model.ARCH
V = ARCH.vocab_size
LAYOUT = PackingConfig(row_tokens=24, row_targets=12, rows=2, capacity=5, head_size=0)


def step_of(form="sampled", **distill):
    changes = {"loss": "reinforce", "distill": {"form": form, **distill}}
    return dataclasses.replace(batches.PLAIN, objective=base_objective(**changes))


def scores(params, form="sampled", top=0, shared=None, arch=ARCH, layout=LAYOUT):
    """Of the random trajectories, under `params`: (statistics, mask), a micro-batch each."""
    config = scoring_config(step_of(form), arch, None)
    found = batches.device_batch(pack(batches.TRAJECTORIES, layout))
    return [(frozen_stats(config, top, params, params, shared, batch), np.asarray(batch.mask)) for batch in found]


def test_they_are_what_an_update_says_of_the_same_weights():
    params = tiny_model.params(3)
    found = batches.batch(head=False)
    for batch, (stats, mask) in zip(found, scores(params), strict=True):
        expected, _, _ = slice_stats(batches.PLAIN, params, params, batch)
        np.testing.assert_allclose(stats.logprobs[mask], np.reshape(expected.logprob, mask.shape)[mask], rtol=1e-6)


def test_an_adapter_beside_a_model_is_the_merged_model():
    params, key = tiny_model.params(3), jax.random.key(0)
    adapter = jax.tree.map(lambda x: jax.random.normal(key, x.shape) * 0.1, init_adapter(ARCH, batches.LORA, key))
    config = scoring_config(batches.PLAIN, ARCH, 2.0)
    (batch, *_) = batches.batch(head=False)
    beside = frozen_stats(config, 0, adapter, params, None, batch).logprobs
    (merged, mask), *_ = scores(merge(params, adapter, 2.0))
    np.testing.assert_allclose(np.asarray(beside)[mask], np.asarray(merged.logprobs)[mask], atol=2e-5)


def test_all_ids_of_the_full_form_and_the_likeliest_of_the_overlap():
    for stats, mask in scores(tiny_model.params(3), "full", top=3):
        whole = np.asarray(stats.candidates)[mask]
        np.testing.assert_allclose(np.exp(whole).sum(-1), 1, rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(stats.likeliest)[mask], np.argsort(-whole, axis=-1)[:, :3])


def test_ids_that_only_the_policy_has_leave_its_log_softmax():
    """A padded width: whatever its rows hold, the log-probs are those of the model without them."""
    params = tiny_model.params(3)
    wide = tiny_model.sized(vocab_size=V + 9)
    noise = 5 * np.random.default_rng(0).normal(size=(9, ARCH.hidden_size))
    padded = {**params, "embed": jnp.concatenate([params["embed"], jnp.asarray(noise, jnp.float32)])}
    shared = SharedIds(jnp.arange(V), jnp.arange(V), jnp.asarray(V + 9))
    for (own, mask), (other, _) in zip(scores(params), scores(padded, shared=shared, arch=wide), strict=True):
        np.testing.assert_allclose(np.asarray(other.logprobs)[mask], np.asarray(own.logprobs)[mask], atol=1e-5)


def test_ids_that_the_target_alone_has_leave_it_too():
    params, known = tiny_model.params(3), np.arange(V) < V - 40
    shared = SharedIds(jnp.arange(V - 40), jnp.where(known, jnp.arange(V), 0), jnp.asarray(V))
    for (whole, mask), (part, _) in zip(scores(params, "full"), scores(params, "full", shared=shared), strict=True):
        expected = jax.nn.log_softmax(np.asarray(whole.candidates)[mask][:, : V - 40])
        np.testing.assert_allclose(np.asarray(part.candidates)[mask][:, : V - 40], expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- convergence

STATES, ALPHA, LAM = 12, 1.2, 1.5
FROZEN = ("reference_logprobs", "signal")


def states():
    """Sequences of a few tokens, of which the last is the target: a state each."""
    rng = np.random.default_rng(5)
    for i in range(STATES):
        ids = rng.integers(0, V, 4 + i % 3).astype(np.int32)
        mask = np.arange(len(ids)) == len(ids) - 1
        yield Trajectory(ids, mask, 0.0, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), None)


def test_a_transformer_trained_with_the_full_form_comes_to_the_optimum():
    """pi = pi_ref (expert / base)^(alpha / lambda) at the states it visits: mean KL at most 0.02 nats."""
    chosen = list(states())
    layout = dataclasses.replace(LAYOUT, row_tokens=48, row_targets=8, rows=STATES, capacity=1)
    policies = [tiny_model.params(seed) for seed in (11, 12, 13)]
    plain = batches.device_batch(pack(chosen, layout))[0]
    config = scoring_config(step_of("full"), ARCH, None)
    mask = np.asarray(plain.mask)
    every = [np.asarray(frozen_stats(config, 0, p, p, None, plain).candidates) for p in policies]
    reference = every[2]
    expert, base = (np.asarray(jax.nn.log_softmax(0.5 * x)) for x in every[:2])
    optimum = jax.nn.log_softmax(reference + ALPHA / LAM * (expert - base))[mask]

    of = np.asarray(plain.sequences)[mask] - 1  # the trajectory at each place
    given = {int(i): {"signal": (expert - base)[mask][at], "reference": reference[mask][at]} for at, i in enumerate(of)}
    with_scores = [
        dataclasses.replace(
            t,
            frozen={
                "signal": given[i]["signal"][t.tokens[t.mask]],
                "reference_logprobs": given[i]["reference"][t.tokens[t.mask]],
                "head_signal": given[i]["signal"][None],
                "head_reference_logprobs": given[i]["reference"][None],
            },
        )
        for i, t in enumerate(chosen)
    ]
    names = (*((name, 0) for name in FROZEN), ("head_signal", V), ("head_reference_logprobs", V))
    frozen = tuple(FrozenArray(name, k, "float32") for name, k in names)
    batch = batches.device_batch(pack(with_scores, dataclasses.replace(layout, frozen=frozen)))
    optimizer, params = optax.adam(optax.linear_schedule(5e-3, 0.0, 250)), policies[2]
    state = LearnerState(*(jnp.zeros((), jnp.int32) for _ in range(3)), params, optimizer.init(params))
    step = step_of("full", alpha=ALPHA, lam=LAM)
    for _ in range(250):
        state, _, _ = update(step, optimizer, state, {}, batch)
    own = frozen_stats(config, 0, state.trainable, state.trainable, None, plain).candidates[mask]
    before = float(np.mean(np.sum(np.exp(optimum) * (optimum - reference[mask]), -1)))
    after = float(np.mean(np.sum(np.exp(optimum) * (optimum - np.asarray(own)), -1)))
    assert before > 0.1, "there is something to learn"
    assert after <= 0.02


def gradient_of(form, params, expert, base, reference, ids):
    """The expected gradient over what the policy would sample after `ids`, of every parameter of the transformer."""
    hidden_of = partial(forward, ARCH)
    positions = jnp.arange(len(ids))[None]

    def logits(p):
        hidden = hidden_of(p, ids[None], positions, jnp.ones_like(ids)[None])[0]
        return hidden @ head_matrix(p).T

    rows, count = len(ids), {"sampled": 1, "top_k": 5, "full": V}[form]
    policy = jax.nn.log_softmax(logits(params))
    head = jax.lax.top_k(policy, count)[1] if form == "top_k" else jnp.tile(jnp.arange(count), (rows, 1))
    targets = every_token(policy, reference, expert - base, head)
    config = step_of(form, alpha=ALPHA, lam=LAM).objective

    def loss(p):
        return objective(config, dense_stats(jnp.repeat(logits(p), V, 0), targets), targets)[0]

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("form", ["sampled", "top_k"])
def test_the_forms_have_one_expected_gradient_in_every_parameter(form):
    rng = np.random.default_rng(3)
    ids = jnp.asarray(rng.integers(0, V, 3))
    drawn = [jax.nn.log_softmax(jnp.asarray(rng.normal(size=(3, V)), jnp.float32)) for _ in range(3)]
    expected = gradient_of("full", tiny_model.params(1), *drawn, ids)
    found = gradient_of(form, tiny_model.params(1), *drawn, ids)
    gaps = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, expected))
    assert max(gaps) < 2e-4
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 0.1
