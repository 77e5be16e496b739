"""Adapters: a fresh one is the base model, merging is the adapter's forward pass, nothing else is touched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.config.schema import LINEAR_LAYERS, LoraConfig
from rlx.models.lora import adapter_scale, init_adapter, linears, merge
from rlx.models.transformer import forward
from tests import tiny_model
from tests.tiny_model import ARCH

LINEAR_NAMES = LINEAR_LAYERS[:7]
CONFIG = LoraConfig(rank=4, alpha=6.0, targets=LINEAR_NAMES)
SCALE = adapter_scale(CONFIG)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, ARCH.vocab_size, (2, 9)), jnp.int32)


@partial(jax.jit, static_argnames="scale")
def hidden(params, adapter=None, scale=1.0):
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    ones = jnp.ones_like(positions)
    return forward(ARCH, params, TOKENS, positions, ones, adapter=adapter, adapter_scale=scale)


def random_adapter(config=CONFIG):
    """Both factors away from zero."""
    shapes = jax.eval_shape(lambda key: init_adapter(ARCH, config, key), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), shapes)


def named(adapter):
    """By the names of the linear layers alone."""
    return {name: low_rank for part in adapter["0"].values() for name, low_rank in part.items()}


def test_a_fresh_adapter_is_the_base_model():
    params, adapter = tiny_model.params(), init_adapter(ARCH, CONFIG, jax.random.key(0))
    np.testing.assert_array_equal(hidden(params, adapter, SCALE), hidden(params))


def test_shapes_and_initial_range():
    adapter = init_adapter(ARCH, CONFIG, jax.random.key(0))
    adapter = named(adapter)
    assert set(adapter) == set(LINEAR_NAMES)
    shapes = {linear.path[-1]: linear.spec.shape for linear in linears(ARCH)}
    for name, low_rank in adapter.items():
        inputs, outputs = shapes[name]
        assert low_rank["a"].shape == (2, inputs, 4)
        assert low_rank["b"].shape == (2, 4, outputs)
        np.testing.assert_array_equal(low_rank["b"], 0)
        largest = float(jnp.abs(low_rank["a"]).max()) * inputs**0.5
        assert 0.9 < largest <= 1, name
    assert not np.array_equal(adapter["q_proj"]["a"], adapter["k_proj"]["a"])


def test_a_further_target_changes_no_other():
    few = LoraConfig(rank=4, alpha=6.0, targets=("v_proj", "q_proj"))
    some, all_of_them = (named(init_adapter(ARCH, c, jax.random.key(0))) for c in (few, CONFIG))
    for name in few.targets:
        np.testing.assert_array_equal(some[name]["a"], all_of_them[name]["a"])


@pytest.mark.parametrize("targets", [LINEAR_NAMES, ("q_proj", "down_proj")])
def test_merging_is_the_adapters_forward_pass(targets):
    params, adapter = tiny_model.params(), random_adapter(LoraConfig(4, 6.0, targets))
    beside, merged = hidden(params, adapter, SCALE), hidden(merge(params, adapter, SCALE))
    np.testing.assert_allclose(merged, beside, atol=1e-5)
    assert float(jnp.abs(beside - hidden(params)).max()) > 0.1


def test_merging_touches_the_targets_kernels_alone():
    params = tiny_model.params()
    before = jax.device_get(params)
    merged = merge(params, random_adapter(LoraConfig(4, 6.0, ("v_proj", "up_proj"))), SCALE)
    flat = jax.tree_util.tree_leaves_with_path(merged)
    shared = {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(params)}
    changed = {jax.tree_util.keystr(p) for p, leaf in flat if leaf is not shared[jax.tree_util.keystr(p)]}
    assert changed == {"['layers']['0']['mixer']['v_proj']['kernel']", "['layers']['0']['mlp']['up_proj']['kernel']"}
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_merging_adds_in_float32_and_keeps_the_dtype():
    """256 + 1.5 + ... in bfloat16: the sum is rounded once."""
    kernel = jnp.full((2, 32, 32), 256, jnp.bfloat16)
    low_rank = {"a": jnp.ones((2, 32, 2)), "b": jnp.ones((2, 2, 32))}
    (merged,) = jax.tree.leaves(
        merge({"layers": {"0": {"q_proj": {"kernel": kernel}}}}, {"0": {"q_proj": low_rank}}, 0.75)
    )
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged, jnp.asarray(257.5, jnp.bfloat16))
    assert float(merged[0, 0, 0]) == 258


def test_scale():
    assert SCALE == 1.5
    assert adapter_scale(LoraConfig(rank=0, alpha=32.0, targets=())) == 1.0
