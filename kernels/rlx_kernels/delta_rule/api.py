"""`delta_rule`: one entry for every implementation of the gated delta rule, and the choice between them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from rlx_kernels import dispatch
from rlx_kernels.delta_rule import chunked, reference
from rlx_kernels.delta_rule.packing import Recurrent, alike, runs

__all__ = ["delta_rule", "delta_rule_step", "unsupported_reason"]

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float64)


class Implementation(NamedTuple):
    """delta_rule(query, key, value, decay, beta, ordinal, initial_state), unsupported_reason(query, value)."""

    name: str
    delta_rule: Callable[..., Recurrent]
    unsupported_reason: Callable[..., str | None]


def _serves_everything(query: jax.Array, value: jax.Array) -> None:
    return None


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("chunked", chunked.delta_rule, _serves_everything),
    Implementation("reference", reference.delta_rule, _serves_everything),
)


def delta_rule(
    query: Float[Array, "rows tokens key_heads key_width"],
    key: Float[Array, "rows tokens key_heads key_width"],
    value: Float[Array, "rows tokens heads value_width"],
    decay: Float[Array, "rows tokens heads"] | Float[Array, "rows tokens heads key_width"],
    beta: Float[Array, "rows tokens heads"],
    *,
    segment_ids: Integer[Array, "rows tokens"],
    initial_state: Float[Array, "rows heads key_width value_width"] | None = None,
    implementation: str | None = None,
) -> Recurrent:
    """The gated delta rule over packed rows. For each head, with a state S [key_width, value_width] in float32:

        S ← e^decay_t S      u_t = beta_t (v_t - Sᵀ k_t)      S ← S + k_t u_tᵀ      out_t = Sᵀ q_t

    `decay` is a log, at most 0 (-inf forgets everything): of a head (GDN, arXiv 2412.06464), or of each of its key
    channels (KDA, arXiv 2510.26692). heads is a multiple of key_heads, head h reads key head h // (heads / key_heads).
    Queries are used as they come: scale them and normalise the keys before.

    A segment is a run of equal ids, and S is 0 where one begins, be that in the middle of a chunk. Ids of 0 and below
    are padding, which leaves S as it is, whatever it holds, NaN too; its outputs and gradients are 0. The first
    segment of a row goes on from `initial_state` (a row that begins with padding drops it); None = 0. The state
    returned is the one after the last valid token of each row, in float32: what `delta_rule_step` and the next part of
    a row go on from. Sums are float32 (float64 where the inputs are); the output has value's dtype. Differentiable in
    every float argument.

    `implementation` is "chunked" (matrix products, any backend), "reference" (token by token), or None: the first.

    Raises:
      ValueError: arguments that do not fit each other, or an implementation that is unknown or cannot serve them.
    """
    arguments = check_arguments(query, key, value, decay, beta, segment_ids, initial_state)
    tried = IMPLEMENTATIONS if implementation is None else [dispatch.find(IMPLEMENTATIONS, implementation)]
    serving = dispatch.resolve("delta_rule", tried, lambda i: i.unsupported_reason(query, value))
    run = runs(segment_ids)
    ordinal, valid, state, *floats = alike(run.ordinal, run.valid, arguments.state, *arguments.of_tokens)
    # a weight of 0 does not remove a NaN or infinity; masking the output masks its cotangent
    masked = (jnp.where(valid[:, :, None, None], x, 0) for x in floats)
    query, key, value, decay, beta = masked
    out, state = serving.delta_rule(query, key, value, decay, beta[..., 0], ordinal, state)
    return Recurrent(jnp.where(valid[:, :, None, None], out, 0).astype(arguments.dtype), state)


def delta_rule_step(
    query: Float[Array, "rows key_heads key_width"],
    key: Float[Array, "rows key_heads key_width"],
    value: Float[Array, "rows heads value_width"],
    decay: Float[Array, "rows heads"] | Float[Array, "rows heads key_width"],
    beta: Float[Array, "rows heads"],
    state: Float[Array, "rows heads key_width value_width"],
) -> Recurrent:
    """`delta_rule` of one more token a row.

    Raises:
      ValueError: arguments that do not fit each other.
    """
    query, key, value, decay, beta = (x[:, None] if x.ndim else x for x in (query, key, value, decay, beta))
    begun = jnp.ones((query.shape[0], 1), jnp.int32)
    arguments = check_arguments(query, key, value, decay, beta, begun, state)
    query, key, value, decay, beta = (x[:, 0] for x in arguments.of_tokens)
    out, state = reference.step(query, key, value, decay, beta[..., 0], arguments.state)
    return Recurrent(out.astype(arguments.dtype), state)


def unsupported_reason(
    implementation: str,
    query: Float[Array, "rows tokens key_heads key_width"],
    key: Float[Array, "rows tokens key_heads key_width"],
    value: Float[Array, "rows tokens heads value_width"],
    decay: Float[Array, "rows tokens heads"] | Float[Array, "rows tokens heads key_width"],
    beta: Float[Array, "rows tokens heads"],
    *,
    segment_ids: Integer[Array, "rows tokens"],
    initial_state: Float[Array, "rows heads key_width value_width"] | None = None,
) -> str | None:
    """Why `implementation` cannot serve these arguments here, None if it can.

    Raises:
      ValueError: an unknown name, or arguments that `delta_rule` refuses whatever the implementation.
    """
    check_arguments(query, key, value, decay, beta, segment_ids, initial_state)
    return dispatch.find(IMPLEMENTATIONS, implementation).unsupported_reason(query, value)


class Arguments(NamedTuple):
    """Of one dtype and number of heads, at least float32."""

    of_tokens: list[jax.Array]  # query, key, value, decay [rows, T, heads, 1 or key_width], beta [rows, T, heads, 1]
    state: jax.Array
    dtype: jnp.dtype  # of the output


def check_arguments(query, key, value, decay, beta, segment_ids, initial_state) -> Arguments:
    """Raises ValueError for what does not fit."""
    if query.ndim != 4 or query.shape != key.shape or value.ndim != 4 or 0 in (*query.shape, *value.shape):
        raise ValueError(
            f"query {query.shape} and key {key.shape} must be [rows, T, K, D] of one shape and value {value.shape} "
            "[rows, T, H, V], none of them 0"
        )
    rows, tokens, heads, value_width = value.shape
    key_heads, key_width = query.shape[2:]
    if query.shape[:2] != (rows, tokens) or heads % key_heads:
        raise ValueError(
            f"query {query.shape} and value {value.shape} must agree in rows and tokens, and the {heads} heads of "
            f"value must be a multiple of the {key_heads} key heads"
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: all must be float32, or all bfloat16"
        )
    each = (rows, tokens, heads)
    if decay.shape not in (each, (*each, key_width)):
        raise ValueError(f"decay {decay.shape} must be {each}, or with one for each key channel {(*each, key_width)}")
    if beta.shape != each:
        raise ValueError(f"beta {beta.shape} must be {each}")
    if segment_ids.shape != each[:2] or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids {segment_ids.dtype}{list(segment_ids.shape)} must be integers {list(each[:2])}")
    of_state = (rows, heads, key_width, value_width)
    if initial_state is not None and initial_state.shape != of_state:
        raise ValueError(f"initial_state {initial_state.shape} must be {of_state}")
    wide = jnp.promote_types(query.dtype, jnp.float32)
    repeated = [jnp.repeat(x, heads // key_heads, axis=2) for x in (query, key)]
    gates = [decay if decay.ndim == 4 else decay[..., None], beta[..., None]]
    state = jnp.zeros(of_state, wide) if initial_state is None else initial_state.astype(wide)
    return Arguments([x.astype(wide) for x in (*repeated, value, *gates)], state, value.dtype)
