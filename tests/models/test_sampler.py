"""The sampler's compiled functions one by one; `tests/rollout/test_local.py` holds them against the forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.models import sampler
from rlx.models.sampler import Admission, SamplerConfig
from tests import tiny_model
from tests.tiny_model import ARCH

SLOTS = 4
CONFIG = SamplerConfig(ends=(8, 16), head_size=3, steps=5)
NO_STOPS = jnp.asarray(sampler.stop_array(()))
PROMPTS = np.random.default_rng(0).integers(0, ARCH.vocab_size, (2, 8))
LENGTHS = np.array([8, 5])
ALL = len(CONFIG.ends)


@pytest.fixture(scope="module")
def params():
    return sampler.unstack_layers(ARCH, tiny_model.params())


@pytest.fixture(scope="module")
def prompts(params):
    return sampler.prefill(ARCH, params, jnp.asarray(PROMPTS, jnp.int32), jnp.asarray(LENGTHS, jnp.int32))


def keys(held):
    return [cache.growing[0] for cache in held.caches]


def values(held):
    return [cache.growing[1] for cache in held.caches]


def admission(*entries):
    """Entries of (slot, prompt, limit)."""
    prompt, limit = np.full(SLOTS, -1, np.int32), np.zeros(SLOTS, np.int32)
    for slot, row, tokens in entries:
        prompt[slot], limit[slot] = row, tokens
    return Admission(
        prompt=jnp.asarray(prompt),
        count=jnp.zeros(SLOTS, jnp.int32),
        limit=jnp.asarray(limit),
        seed=7 + jnp.arange(SLOTS, dtype=jnp.uint32),
        temperature=jnp.ones(SLOTS),
    )


def admitted(prompts, *entries):
    return sampler.admit(ARCH, sampler.init_slots(ARCH, CONFIG.ends, SLOTS, jnp.float32), prompts, admission(*entries))


def decode(params, slots, stretches=ALL, until_free=False):
    """(slots, what was written), on the host."""
    return jax.device_get(sampler.decode(ARCH, CONFIG, stretches, params, slots, jnp.asarray(until_free), NO_STOPS))


def test_layers_are_unstacked_in_order():
    stacked = tiny_model.params()
    layers = sampler.unstack_layers(ARCH, stacked)["layers"]
    assert len(layers) == ARCH.num_layers
    np.testing.assert_array_equal(
        layers[1]["mixer"]["q_proj"]["kernel"], stacked["layers"]["0"]["mixer"]["q_proj"]["kernel"][1]
    )


def test_padding_of_a_prompt_is_not_seen_by_it(params, prompts):
    padded = PROMPTS.copy()
    padded[1, LENGTHS[1] :] += 1
    padded %= ARCH.vocab_size
    other = sampler.prefill(ARCH, params, jnp.asarray(padded, jnp.int32), prompts.lengths)
    for layer in range(ARCH.num_layers):
        for x, y in (
            (keys(prompts)[layer][1], keys(other)[layer][1]),
            (values(prompts)[layer][1].mT, values(other)[layer][1].mT),
        ):
            np.testing.assert_array_equal(x[..., : LENGTHS[1]], y[..., : LENGTHS[1]])
            assert not np.array_equal(x, y)


def test_prompts_reach_their_slots_and_no_other(prompts):
    slots = admitted(prompts, (3, 1, 4), (0, 0, 6))
    np.testing.assert_array_equal(slots.active, [True, False, False, True])
    np.testing.assert_array_equal(slots.position, [7, 0, 0, 4])
    np.testing.assert_array_equal(slots.token, [PROMPTS[0, 7], 0, 0, PROMPTS[1, 4]])
    np.testing.assert_array_equal(slots.limit, [6, 0, 0, 4])
    np.testing.assert_array_equal(slots.seed, [7, 0, 0, 10])
    for layer in range(ARCH.num_layers):
        for held, rows in ((keys(slots), keys(prompts)), (values(slots), values(prompts))):
            np.testing.assert_array_equal(held[layer][0][3], rows[layer][1])
            np.testing.assert_array_equal(held[layer][0][0], rows[layer][0])
            np.testing.assert_array_equal(held[layer][0][1:3], 0)
            assert all(not jnp.any(stretch) for stretch in held[layer][1:])


def test_a_slot_that_is_not_admitted_goes_on_with_what_it_has(params, prompts):
    slots, _ = decode(params, admitted(prompts, (0, 0, 6), (1, 1, 6)))
    again = sampler.admit(ARCH, jax.tree.map(jnp.asarray, slots), prompts, admission((1, 0, 6)))
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(slots), strict=True):
        np.testing.assert_array_equal(x[0], y[0])
    np.testing.assert_array_equal(again.count[:2], [5, 0])
    np.testing.assert_array_equal(keys(again)[1][0][1], keys(prompts)[1][0])


def test_decoding_writes_up_to_each_limit_and_leaves_idle_slots(params, prompts):
    start = admitted(prompts, (0, 0, 2), (2, 1, 6))
    slots, first = decode(params, start)
    np.testing.assert_array_equal(first.written, [2, 0, 5, 0])
    np.testing.assert_array_equal(slots.count, [2, 0, 5, 0])
    np.testing.assert_array_equal(first.active, [False, False, True, False])
    np.testing.assert_array_equal(slots.position, [9, 0, 9, 0])
    np.testing.assert_array_equal(slots.token[[0, 2]], first.drawn.tokens[[1, 4], [0, 2]])
    assert (first.drawn.logprobs[:, 2] < 0).all()
    slots, second = decode(params, slots)
    np.testing.assert_array_equal(second.written, [0, 0, 1, 0])
    assert not second.active.any()


def test_fewer_stretches_compute_the_same_and_end_where_they_end(params, prompts):
    """To the bit: what lies beyond a position adds exact zeros."""
    steps = CONFIG.ends[0] - 4  # the token at position 4 is the first one fed
    whole = decode(params, admitted(prompts, (0, 1, 8), (2, 1, 8)))[1]
    slots, part = decode(params, admitted(prompts, (0, 1, 8), (2, 1, 8)), stretches=1)
    np.testing.assert_array_equal(part.written, [steps, 0, steps, 0])
    for x, y in zip(jax.tree.leaves(part.drawn), jax.tree.leaves(whole.drawn), strict=True):
        np.testing.assert_array_equal(x[:steps, [0, 2]], y[:steps, [0, 2]])
    rest = decode(params, slots)[1]
    np.testing.assert_array_equal(rest.drawn.tokens[: 5 - steps, [0, 2]], whole.drawn.tokens[steps:5, [0, 2]])


def test_a_dispatch_ends_when_a_slot_is_free_for_somebody(params, prompts):
    start = lambda: admitted(prompts, (0, 0, 2), (2, 1, 6))  # noqa: E731
    np.testing.assert_array_equal(decode(params, start(), until_free=True)[1].written, [2, 0, 2, 0])
    np.testing.assert_array_equal(decode(params, start(), until_free=False)[1].written, [2, 0, 5, 0])


def test_a_stop_token_ends_its_slot(params, prompts):
    free = decode(params, admitted(prompts, (0, 0, 6), (1, 1, 6)))[1].drawn.tokens
    stop = int(free[2, 0])
    assert stop not in free[:2, 0]
    assert stop not in free[:, 1]
    stops = jnp.asarray(sampler.stop_array((ARCH.vocab_size - 1, stop)))
    slots = admitted(prompts, (0, 0, 6), (1, 1, 6))
    _, dispatch = sampler.decode(ARCH, CONFIG, ALL, params, slots, jnp.asarray(False), stops)
    np.testing.assert_array_equal(dispatch.written[:2], [3, 5])
    np.testing.assert_array_equal(dispatch.active[:2], [False, True])
    np.testing.assert_array_equal(dispatch.stopped[:2], [True, False])


def test_released_slots_write_nothing_more(params, prompts):
    slots = admitted(prompts, (0, 0, 6), (2, 1, 6))
    slots = sampler.release(slots, jnp.arange(SLOTS) == 0)
    np.testing.assert_array_equal(decode(params, slots)[1].written, [0, 0, 5, 0])


def test_resized_slots_go_on_where_they_were(params, prompts):
    """Two steps, resized, and on: the tokens are those of slots that stayed."""
    whole = decode(params, admitted(prompts, (0, 0, 2), (2, 1, 2)))[0]
    more = whole.replace(limit=np.full(SLOTS, 6), active=np.isin(np.arange(SLOTS), [0, 2]))
    wanted = decode(params, jax.tree.map(jnp.asarray, more))[1]
    at = np.array([2, -1, 0], np.int32)
    moved = sampler.resize(jax.tree.map(jnp.asarray, more), jnp.asarray(at))
    found = decode(params, moved)[1]
    np.testing.assert_array_equal(found.written, np.where(at >= 0, wanted.written[at], 0))
    np.testing.assert_array_equal(found.drawn.tokens[:4, at >= 0], wanted.drawn.tokens[:4, at[at >= 0]])


def test_decoding_nothing_changes_nothing(params):
    idle = sampler.init_slots(ARCH, CONFIG.ends, SLOTS, jnp.float32)
    before = jax.device_get(idle)
    after, dispatch = decode(params, idle)
    assert jax.tree.all(jax.tree.map(np.array_equal, after, before))
    assert not dispatch.written.any()
