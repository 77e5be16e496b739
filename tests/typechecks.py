"""The checker that jaxtyping's import hook applies under pytest: shapes and dtypes of array functions."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

CHECKED = ("rlx_kernels", "rlx.algos", "rlx.models", "rlx.learner")

# An int is accepted for a float, as in Python's own typing rules.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def array_functions(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations enforced if one of them says an array's shape and it is no constructor.

    jax rebuilds pytree dataclasses around whatever a transformation holds in the place of their arrays (None, shapes,
    shardings, abstract values), so what a constructor is given says nothing about what its fields are for.
    """
    if function.__name__ == "__init__":
        return function
    return _checked(function) if any(map(_says_shape, inspect.get_annotations(function).values())) else function


def _says_shape(annotation: Any) -> bool:
    is_array = inspect.isclass(annotation) and issubclass(annotation, AbstractArray)
    return is_array or any(map(_says_shape, typing.get_args(annotation)))
