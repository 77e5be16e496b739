"""Packed causal attention by cuDNN. The only file that knows jax's private interface to it.

`jax.nn.dot_product_attention` has no packed segments; the function below it takes the offset and length of each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rlx_kernels.attention.xla import Packing

JAX_VERSIONS = ("0.11.2",)  # the interface is private: these are the releases it was read in
MAX_WIDTH = 256


def unsupported_reason(query, key, value, packing: Packing) -> str | None:
    if jax.__version__ not in JAX_VERSIONS:
        return f"jax is {jax.__version__}, and its private interface to cuDNN is known for {', '.join(JAX_VERSIONS)}"
    if packing.prefix_ids is not None:
        return "a segment with a shared prefix sees two ranges of keys, and cuDNN takes one"
    if packing.max_segments is None:
        return "needs max_segments, the promise that segments are contiguous and in order"
    if query.dtype != jnp.bfloat16:
        return f"takes bfloat16, not {query.dtype}"
    if query.shape[3] % 8 or query.shape[3] > MAX_WIDTH:
        return f"heads are {query.shape[3]} wide, and it takes multiples of 8 up to {MAX_WIDTH}"
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU; the default backend is {jax.default_backend()}"
    capability = jax.local_devices()[0].compute_capability
    if float(capability) < 9.0:
        return f"packed segments need compute capability 9.0, this GPU has {capability}"
    return None


def attention(
    query: Float[Array, "rows tokens heads width"],
    key: Float[Array, "rows tokens kv_heads width"],
    value: Float[Array, "rows tokens kv_heads width"],
    packing: Packing,
) -> Float[Array, "rows tokens heads width"]:
    """`rlx_kernels.attention.attention` of rows whose segments are contiguous and in order; NaN where they are not."""
    from jax._src.cudnn import fused_attention_stablehlo as fused  # private: only a known release gets here

    starts, lengths, kept = segment_ranges(packing)
    out = fused.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=query.shape[3] ** -0.5,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=packing.window,
    )
    return jnp.where(kept[:, None, None, None], out, jnp.nan)


def segment_ranges(packing: Packing):
    """(first token [rows, M + 1] and length [rows, M] of each segment, -1 where there is none; is the promise kept)."""
    segments, positions = packing.segment_ids, packing.positions
    assert packing.max_segments is not None  # or `unsupported_reason` says so
    most = max(packing.max_segments, 2)  # with one, the packed layout is off
    previous = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    begins = (segments > 0) & (segments != previous)
    run = jnp.cumsum(begins, axis=1) - 1  # of each token

    def of_row(begins, run, valid):
        starts = jnp.nonzero(begins, size=most + 1, fill_value=-1)[0].astype(jnp.int32)
        lengths = jnp.zeros(most, jnp.int32).at[run].add(valid.astype(jnp.int32), mode="drop")
        return starts, jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(begins, run, segments > 0)
    expected = jnp.arange(segments.shape[1]) - jnp.take_along_axis(starts, jnp.clip(run, 0, most), axis=1)
    in_order = (segments == 0) | (positions == expected)
    return starts, lengths, in_order.all(1) & (begins.sum(1) <= packing.max_segments)
