"""A Qwen3 of two small layers with random weights over the tiny tokenizer, as a Hugging Face directory: `build(path)`.

Weights are drawn wider than a model is initialised, so that its distributions are neither flat nor certain.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from rlx.models.hf import save_params
from rlx.models.presets import dense
from rlx.models.spec import Architecture, Params, param_specs
from tests import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": tiny_tokenizer.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tied": True,
    "max_positions": 512,
}


def sized(**changes: Any) -> Architecture:
    """The same family in other sizes: arguments of `dense`."""
    return dense("qwen3", **SIZES | changes)


ARCH = sized()
SCALE = 0.2  # standard deviation of the weights


def params(seed: int = 0, arch: Architecture = ARCH) -> Params:
    """float32 weights, those of norms around 1; another seed is another model. By numpy: nothing is compiled."""
    rng = np.random.default_rng(seed)
    flat = traverse_util.flatten_dict(param_specs(arch))
    drawn = {path: SCALE * rng.normal(size=s.shape) + (s.initializer == "ones") for path, s in flat.items()}
    return traverse_util.unflatten_dict({path: jnp.asarray(x, jnp.float32) for path, x in drawn.items()})


def build(directory: pathlib.Path | str, arch: Architecture = ARCH, seed: int = 0) -> str:
    """Write weights, config.json and tokenizer to `directory`, which must not exist, and return it."""
    save_params(directory, arch, params(seed, arch), "float32")
    return tiny_tokenizer.build(directory)
