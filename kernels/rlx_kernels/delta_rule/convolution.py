"""The short causal convolution along the tokens, a filter for each channel, over packed rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from rlx_kernels.delta_rule.packing import Recurrent, alike, runs

__all__ = ["causal_convolution", "causal_convolution_step"]


def causal_convolution(
    x: Float[Array, "rows tokens channels"],
    weight: Float[Array, "channels width"],
    *,
    segment_ids: Integer[Array, "rows tokens"],
    initial_state: Float[Array, "rows before channels"] | None = None,
) -> Recurrent:
    """out[t] = Σ_s weight[:, width - 1 - s] x[t - s] over the last `width` tokens of t's own segment.

    A segment is a run of equal ids; ids of 0 and below are padding, which is not read and whose outputs are 0. The
    last tap is the current token's. `initial_state` holds the width - 1 inputs before the row, which its first segment
    goes on from (a row that begins with padding drops them); None = zeros. The state returned is the same of each
    row's last segment: what `causal_convolution_step` and the next part of a row go on from.

    Raises:
      ValueError: arguments that do not fit each other.
    """
    check_arguments(x, weight, segment_ids, initial_state)
    (rows, tokens, channels), width = x.shape, weight.shape[1]
    before = jnp.zeros((rows, width - 1, channels), x.dtype) if initial_state is None else initial_state
    x, weight, segment_ids, before = alike(x, weight, segment_ids, before.astype(x.dtype))
    run = runs(segment_ids)
    inputs = jnp.concatenate([before, jnp.where(run.valid[..., None], x, 0)], axis=1)
    ordinal = jnp.pad(run.ordinal, ((0, 0), (width - 1, 0)))
    out = jnp.zeros_like(x)
    for tap in range(width):
        same = ordinal[:, tap : tap + tokens] == run.ordinal
        out += jnp.where(same[..., None], inputs[:, tap : tap + tokens], 0) * weight[:, tap]
    return Recurrent(jnp.where(run.valid[..., None], out, 0), _last(inputs, ordinal, run.valid, width - 1))


def causal_convolution_step(
    x: Float[Array, "rows channels"],
    weight: Float[Array, "channels width"],
    state: Float[Array, "rows before channels"],
) -> Recurrent:
    """`causal_convolution` of one more token a row."""
    inputs = jnp.concatenate([state.astype(x.dtype), x[:, None]], axis=1)
    return Recurrent(jnp.einsum("rkc,ck->rc", inputs, weight), inputs[:, 1:].astype(state.dtype))


def _last(inputs: jax.Array, ordinal: jax.Array, valid: jax.Array, count: int) -> jax.Array:
    """The `count` inputs up to each row's last valid token, 0 before its segment."""
    tokens = valid.shape[1]
    end = jnp.max(jnp.where(valid, jnp.arange(1, tokens + 1), 0), axis=1, keepdims=True)
    index = end + jnp.arange(count)  # in `inputs`, where token t is at t + count
    of_end = jnp.take_along_axis(ordinal, end + count - 1, axis=1)
    same = jnp.take_along_axis(ordinal, index, axis=1) == of_end
    return jnp.where(same[..., None], jnp.take_along_axis(inputs, index[..., None], axis=1), 0)


def check_arguments(x, weight, segment_ids, initial_state):
    if x.ndim != 3 or weight.ndim != 2 or x.shape[2] != weight.shape[0] or 0 in (*x.shape, *weight.shape):
        raise ValueError(
            f"x {x.shape} and weight {weight.shape} must be [rows, T, C] and [C, width] of one C, none of them 0"
        )
    (rows, tokens, channels), width = x.shape, weight.shape[1]
    if segment_ids.shape != (rows, tokens) or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids {segment_ids.dtype}{list(segment_ids.shape)} must be integers {[rows, tokens]}")
    of_state = (rows, width - 1, channels)
    if initial_state is not None and initial_state.shape != of_state:
        raise ValueError(f"initial_state {initial_state.shape} must be {of_state}: width - 1 inputs a row")
