"""Parameter trees: shapes and axes, published parameter counts, and initialisation leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from rlx.config.schema import LINEAR_LAYERS
from rlx.models.presets import dense
from rlx.models.spec import ParamSpec, count_parameters, init_params, param_specs
from tests.tiny_model import ARCH, SIZES, sized

QWEN3_06B_SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tied": True,
    "max_positions": 40_960,
}
QWEN3_06B = dense("qwen3", **QWEN3_06B_SIZES)
QWEN3_14B = dense(
    "qwen3",
    **QWEN3_06B_SIZES
    | {"hidden_size": 5120, "intermediate_size": 17_408, "num_layers": 40, "num_heads": 40, "tied": False},
)
QWEN25_05B = dense(
    "qwen2",
    **QWEN3_06B_SIZES
    | {"hidden_size": 896, "intermediate_size": 4864, "num_layers": 24, "num_heads": 14}
    | {"num_kv_heads": 2, "head_dim": 64},
)


def flat(tree):
    return traverse_util.flatten_dict(tree)


@pytest.mark.parametrize(
    "arch, published", [(QWEN3_06B, 596_049_920), (QWEN3_14B, 14_768_307_200), (QWEN25_05B, 494_032_768)]
)
def test_published_parameter_counts(arch, published):
    """Of 14B a single stacked kernel exceeds what 32 bits count."""
    assert count_parameters(arch) == published


@pytest.mark.parametrize("arch", [ARCH, QWEN3_14B, QWEN25_05B], ids=["tied", "untied", "biases"])
def test_every_dimension_has_an_axis_and_blocks_are_stacked(arch):
    specs = flat(param_specs(arch))
    assert all(isinstance(s, ParamSpec) and len(s.axes) == len(s.shape) for s in specs.values())
    for path, spec in specs.items():
        assert (spec.axes[0] == "layer") == (path[0] == "layers")
        assert path[0] != "layers" or spec.shape[0] == arch.num_layers
    assert (("head",) in specs) == (not arch.tied)
    assert {path[-2] for path in specs if path[-1] == "kernel"} == set(LINEAR_LAYERS[:7])
    biased = {path[-2] for path in specs if path[-1] == "bias"}
    assert biased == ({"q_proj", "k_proj", "v_proj"} if arch.model_type == "qwen2" else set())


def test_an_axis_has_one_size_in_an_architecture():
    sizes: dict[str, set[int]] = {}
    for spec in flat(param_specs(QWEN3_14B)).values():
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    assert all(len(found) == 1 for found in sizes.values()), sizes


def test_initial_values():
    arch = dense("qwen2", **SIZES | {"tied": False})
    params = flat(init_params(arch, jax.random.key(0), scale=0.5))
    assert {path: leaf.shape for path, leaf in params.items()} == {
        p: s.shape for p, s in flat(param_specs(arch)).items()
    }
    np.testing.assert_array_equal(params["layers", "0", "mixer", "q_proj", "bias"], 0)
    np.testing.assert_array_equal(params["final_norm",], 1)
    for path, leaf in params.items():
        if path[-1] in ("kernel", "embed", "head"):
            assert abs(float(leaf.std()) - 0.5) < 0.03, path
    assert not np.array_equal(*(params["layers", "0", "mixer", name, "kernel"] for name in ("k_proj", "v_proj")))
    assert not np.array_equal(params["embed",], params["head",])


def test_a_further_leaf_changes_no_other():
    tied, untied = (flat(init_params(arch, jax.random.key(3))) for arch in (ARCH, sized(tied=False)))
    assert untied.keys() - tied.keys() == {("head",)}
    for path, leaf in tied.items():
        np.testing.assert_array_equal(leaf, untied[path])


def test_the_key_and_the_dtype_decide():
    first, again, other = (init_params(ARCH, jax.random.key(seed), jnp.bfloat16)["embed"] for seed in (0, 0, 1))
    assert first.dtype == jnp.bfloat16
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
