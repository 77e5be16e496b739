"""The gated delta rule token by token: for tests, and one token of it for decoding."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rlx_kernels.delta_rule.packing import Recurrent


def delta_rule(
    query: Float[Array, "rows tokens heads key_width"],
    key: Float[Array, "rows tokens heads key_width"],
    value: Float[Array, "rows tokens heads value_width"],
    decay: Float[Array, "rows tokens heads channels"],
    beta: Float[Array, "rows tokens heads"],
    ordinal: Int[Array, "rows tokens"],
    initial_state: Float[Array, "rows heads key_width value_width"],
) -> Recurrent:
    """`rlx_kernels.delta_rule.delta_rule` of checked arguments of one float dtype; `channels` is 1 or key_width."""

    def body(state, xs):
        begins, query, key, value, decay, beta = xs
        state = jnp.where(begins[:, None, None, None], 0, state)
        out, state = step(query, key, value, decay, beta, state)
        return state, out

    begins = _begins(ordinal)
    tokens_first = [jnp.moveaxis(x, 1, 0) for x in (begins, query, key, value, decay, beta)]
    state, out = lax.scan(body, initial_state, tuple(tokens_first))
    return Recurrent(jnp.moveaxis(out, 0, 1), state)


def step(
    query: Float[Array, "rows heads key_width"],
    key: Float[Array, "rows heads key_width"],
    value: Float[Array, "rows heads value_width"],
    decay: Float[Array, "rows heads channels"],
    beta: Float[Array, "rows heads"],
    state: Float[Array, "rows heads key_width value_width"],
) -> Recurrent:
    """The rule itself, for one token."""
    state = state * jnp.exp(decay)[..., None]
    update = beta[..., None] * (value - _product("rhkv,rhk->rhv", state, key))
    state = state + key[..., None] * update[..., None, :]
    return Recurrent(_product("rhkv,rhk->rhv", state, query), state)


def _begins(ordinal: Int[Array, "rows tokens"]) -> Bool[Array, "rows tokens"]:
    return jnp.diff(ordinal, axis=1, prepend=0) > 0


def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, precision=lax.Precision.HIGHEST)
