"""The environment that tests/conftest.py makes: checked shapes, virtual devices."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from flax import struct
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from rlx.algos.masked import masked_sum, mean_by_id
from rlx.learner.state import LearnerState
from tests.typechecks import array_functions

checked = functools.partial(jaxtyped, typechecker=array_functions)


def test_wrong_shapes_are_refused_in_the_projects_own_functions():
    mask, ids = jnp.ones(3, bool), jnp.zeros(3, int)
    assert mean_by_id(mask, jnp.ones(3), ids).shape == (3,)
    with pytest.raises(TypeCheckError):
        mean_by_id(mask, jnp.ones(4), ids)


def test_wrong_dtypes_are_refused_inside_jit_too():
    with pytest.raises(TypeCheckError):
        jax.jit(masked_sum)(jnp.ones(3), jnp.ones(3))
    assert jax.jit(masked_sum)(jnp.ones(3, bool), jnp.ones(3)) == 3


def test_pytree_dataclasses_are_rebuilt_around_anything():
    state = LearnerState(
        version=jnp.int32(0), skipped=jnp.int32(0), skipped_in_row=jnp.int32(0), trainable={}, optimizer=()
    )
    assert jax.tree.map(lambda _: None, state).version is None
    assert jax.eval_shape(lambda: state).version == jax.ShapeDtypeStruct((), jnp.int32)
    assert jax.vmap(lambda s: s, axis_size=2, in_axes=None)(state).version.shape == (2,)


def test_a_dataclass_with_shapes_on_its_fields_is_rebuilt_too():
    @checked
    @struct.dataclass
    class Point:
        x: Float[Array, "3"]

    assert jax.tree.map(lambda _: "x", Point(jnp.ones(3))).x == "x"


def test_functions_without_shapes_are_left_alone_and_ints_pass_for_floats():
    @checked
    def scale(x: Float[Array, " n"], by: float) -> Float[Array, " n"]:
        return x * by

    @checked
    def name(text: str) -> str:
        return text

    assert scale(jnp.ones(2), 2).shape == (2,)
    assert name(3) == 3
    with pytest.raises(TypeCheckError):
        scale(jnp.ones(2), "2")


def test_there_are_eight_devices(devices8):
    assert len(set(devices8)) == 8


@pytest.mark.skipif(os.environ["JAX_PLATFORMS"] != "cpu", reason="virtual devices are the CPU's")
def test_the_virtual_devices_are_24():
    assert jax.device_count() == 24
