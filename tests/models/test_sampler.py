"""The sampler's compiled functions one by one; `tests/rollout/test_local.py` holds them against the forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models import sampler
from rlx.models.sampler import Admission, SamplerConfig
from tests import tiny_model
from tests.tiny_model import ARCH

CONFIG = SamplerConfig(slots=4, context=16, max_new_tokens=6, head_size=3, steps=5, stop_ids=())
PROMPTS = np.random.default_rng(0).integers(0, ARCH.vocab_size, (2, 8))
LENGTHS = np.array([8, 5])


@pytest.fixture(scope="module")
def params():
    return sampler.unstack_layers(tiny_model.params())


def admission(*entries):
    """Entries of (slot, prompt, limit), padded with entries that are to be dropped."""
    padded = np.array([*entries, *[(CONFIG.slots, 0, 0)] * (CONFIG.slots - len(entries))], np.int32)
    slot, prompt, limit = (jnp.asarray(column) for column in padded.T)
    return Admission(
        slot=slot,
        prompt=prompt,
        count=jnp.zeros(CONFIG.slots, jnp.int32),
        limit=limit,
        seed=jnp.arange(CONFIG.slots, dtype=jnp.uint32),
        temperature=jnp.ones(CONFIG.slots),
    )


def admitted(params, *entries):
    keys, values = sampler.prefill(ARCH, params, jnp.asarray(PROMPTS, jnp.int32))
    slots = sampler.init_slots(ARCH, CONFIG, jnp.float32)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return sampler.admit(slots, keys, values, jnp.asarray(PROMPTS, jnp.int32), lengths, admission(*entries))


def test_layers_are_unstacked_in_order():
    stacked = tiny_model.params()
    layers = sampler.unstack_layers(stacked)["layers"]
    assert len(layers) == ARCH.num_layers
    np.testing.assert_array_equal(layers[1]["q_proj"]["kernel"], stacked["layers"]["q_proj"]["kernel"][1])


def test_padding_of_a_prompt_is_not_seen_by_it(params):
    padded = PROMPTS.copy()
    padded[1, LENGTHS[1] :] += 1
    padded %= ARCH.vocab_size
    first, second = (sampler.prefill(ARCH, params, jnp.asarray(p, jnp.int32)) for p in (PROMPTS, padded))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x[1, : LENGTHS[1]], y[1, : LENGTHS[1]])
        assert not np.array_equal(x[1], y[1])


def test_prompts_reach_their_slots_and_no_other(params):
    keys, _ = sampler.prefill(ARCH, params, jnp.asarray(PROMPTS, jnp.int32))
    slots = admitted(params, (3, 1, 4), (0, 0, 6))
    np.testing.assert_array_equal(slots.active, [True, False, False, True])
    np.testing.assert_array_equal(slots.position, [7, 0, 0, 4])
    np.testing.assert_array_equal(slots.token, [PROMPTS[0, 7], 0, 0, PROMPTS[1, 4]])
    np.testing.assert_array_equal(slots.limit, [6, 0, 0, 4])
    np.testing.assert_array_equal(slots.seed, [1, 0, 0, 0])
    for layer in range(ARCH.num_layers):
        np.testing.assert_array_equal(slots.keys[layer][3, :8], keys[layer][1])
        np.testing.assert_array_equal(slots.keys[layer][0, :8], keys[layer][0])
        np.testing.assert_array_equal(slots.keys[layer][1:3], 0)


def test_one_prompt_for_several_slots(params):
    slots = admitted(params, (1, 0, 2), (2, 0, 2))
    np.testing.assert_array_equal(slots.keys[1][1], slots.keys[1][2])
    assert float(jnp.abs(slots.keys[1][1, :8]).max()) > 0


def test_decoding_writes_up_to_each_limit_and_leaves_idle_slots(params):
    slots = sampler.decode(ARCH, CONFIG, params, admitted(params, (0, 0, 2), (2, 1, 6)))
    np.testing.assert_array_equal(slots.count, [2, 0, 5, 0])
    np.testing.assert_array_equal(slots.active, [False, False, True, False])
    np.testing.assert_array_equal(slots.position, [9, 0, 9, 0])
    np.testing.assert_array_equal(slots.token[jnp.array([0, 2])], [slots.tokens[0, 1], slots.tokens[2, 4]])
    written = np.asarray(slots.logprobs) != 0
    np.testing.assert_array_equal(written.sum(1), [2, 0, 5, 0])
    assert not slots.stopped.any()
    slots = sampler.decode(ARCH, CONFIG, params, slots)
    np.testing.assert_array_equal(slots.count, [2, 0, 6, 0])
    assert not slots.active.any()


def test_decoding_nothing_changes_nothing(params):
    idle = sampler.init_slots(ARCH, CONFIG, jnp.float32)
    before = jax.device_get(idle)
    after = jax.device_get(sampler.decode(ARCH, CONFIG, params, idle))
    assert jax.tree.all(jax.tree.map(np.array_equal, after, before))
