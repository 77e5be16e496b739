"""The log-prob head on Hopper GPUs: kernels for what is as large as the logits, XLA for the rest.

Forwards one kernel reduces the logits to their moments. Backwards another writes a block of bfloat16 d_logits, and the
products with the head and with the hidden states are the library's: atomics into d_head from inside a kernel lose.

The logits of ids are taken in XLA, from gathered rows of the head. In the kernel a target would cost a comparison and
a selection for each logit, a list of candidates K of them; gathered, J ids a token read J·D·2 bytes: 17 GB, 3.6 of 29
ms, for 128 candidates at T = 16,384, D = 4,096, and next to nothing for the target alone. Backwards their columns are
written over in XLA, for the same reason and for another: p a + g cancels where p is near 1, so it must be summed
before it is rounded to bfloat16.

A head of V rows is copied once a pass, padded, where V is no multiple of 16 or below 256.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob import core
from rlx_kernels.logprob.core import LOG_ZERO, Backend, Moments, Options
from rlx_kernels.logprob.precision import Precision
from rlx_kernels.logprob.reference import TokenStats
from rlx_kernels.logprob.tiling import Tile

JAX_VERSION, CAPABILITY = "0.11.2", "9.0"  # Mosaic's names change with each release; warpgroup products are Hopper's
D_LOGITS_BYTES = 5 << 28  # of bfloat16 d_logits that may be alive
GATHERED_BYTES = 1 << 28  # of head rows, should XLA not fuse the gather with the sum


def unsupported_reason(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    candidates: jax.Array | None,
    vocab_axis: str | None,
    precision: Precision,
) -> str | None:
    if jax.__version__ != JAX_VERSION:
        return f"jax is {jax.__version__}, and these kernels are written against {JAX_VERSION}"
    if (reason := _backend_reason()) is not None:
        return reason
    if precision != "bfloat16" or head.dtype != jnp.bfloat16:
        return f"multiplies in bfloat16 with a bfloat16 head; asked for {precision} with a head in {head.dtype}"
    depth = _kernels().DEPTH
    if hidden.shape[1] % depth:
        return f"hidden states are {hidden.shape[1]} wide, which is no multiple of {depth}"
    return _devices_reason()


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float,
    vocab_axis: str | None,
    precision: Precision,
    interpret: bool = False,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` by these kernels; `interpret` runs them on a CPU, very slowly, for tests."""
    return core.token_stats(
        INTERPRETED if interpret else COMPILED,
        hidden,
        head,
        targets,
        candidates,
        temperature=temperature,
        vocab_axis=vocab_axis,
        precision=precision,
        platform="gpu",
    )


def _kernels():
    """Imported only where they run: on another version of jax, whose names differ, it may fail."""
    from rlx_kernels.logprob import mosaic_kernels

    return mosaic_kernels


def _backend_reason() -> str | None:
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs an NVIDIA GPU of compute capability {CAPABILITY}; the default backend is {backend}"
    device = jax.local_devices()[0]
    if device.compute_capability != CAPABILITY:
        return f"needs compute capability {CAPABILITY} (Hopper); {device.device_kind} has {device.compute_capability}"
    return None


def _devices_reason() -> str | None:
    """A kernel has no partitioning rule: XLA would gather its operands to every device, or fail."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        count = jax.device_count()
        return None if count == 1 else f"{count} devices are visible: call inside jax.shard_map over all mesh axes"
    automatic = [a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1]
    if automatic:
        return f"mesh axes {', '.join(map(repr, automatic))} are not manual: call inside jax.shard_map over all of them"
    return None


def tile(tokens: int, vocab: int, backward: bool) -> Tile:
    """Forwards no logit is kept. Backwards all tokens, and blocks of columns that leave no rest where that is possible.

    A rest is one more program, and XLA then copies the head's gradient between the two.
    """
    if not backward:
        return Tile(tokens, vocab)
    kernels, blocks = _kernels(), -(-2 * tokens * vocab // D_LOGITS_BYTES)
    for n in range(blocks, 2 * blocks):
        if vocab % (kernels.ALIGNMENT * n) == 0:
            return Tile(tokens, vocab // n)
    return Tile(tokens, -(-vocab // (blocks * kernels.TILE)) * kernels.TILE)


def moments(
    options: Options,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    ids: Int[Array, "tokens ids"],
    *,
    interpret: bool = False,
) -> Moments:
    hidden = hidden.astype(jnp.bfloat16)
    top, mass, moment = _kernels().row_moments(hidden, head, options.temperature, interpret)
    picked = logits_of_ids(hidden, head, ids, options.temperature)
    # the same logit in another order of summation may come out above the maximum
    return Moments(top, mass, moment, jnp.where(ids < head.shape[0], jnp.minimum(picked, top[:, None]), 0))


def d_logits(
    options: Options,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    ids: Int[Array, "tokens ids"],
    logprobs: Float[Array, "tokens ids"],
    logsumexp: Float[Array, " tokens"],
    offset: Float[Array, " tokens"],
    g_entropy: Float[Array, " tokens"],
    g_ids: Float[Array, "tokens ids"],
    *,
    interpret: bool = False,
) -> Float[Array, "tokens vocab"]:
    hidden = hidden.astype(jnp.bfloat16)
    dense = _kernels().dense_d_logits(hidden, head, options.temperature, logsumexp, offset, g_entropy, interpret)
    return with_ids(dense, ids, logprobs, offset, g_entropy, g_ids)


COMPILED = Backend(moments, d_logits, tile)
INTERPRETED = Backend(functools.partial(moments, interpret=True), functools.partial(d_logits, interpret=True), tile)


def logits_of_ids(hidden, head, ids, temperature: float):
    """[T, J] float32 logits of ids [T, J], of some column where the id is not one."""
    held = jnp.minimum(ids, head.shape[0] - 1)

    def of_token(x):
        state, held = x
        return (head[held].astype(jnp.float32) * state.astype(jnp.float32)).sum(-1)

    most = max(GATHERED_BYTES // (ids.shape[1] * head.shape[1] * head.dtype.itemsize), 1)
    block = min(1 << (most.bit_length() - 1), hidden.shape[0])  # a power of two seldom leaves a rest
    return lax.map(of_token, (hidden, held), batch_size=block) / temperature


def with_ids(d_logits, ids, logprobs, offset, g_entropy, g_ids):
    """d_logits [T, V] with the columns ids [T, J] written again: g_ids added, in float32 and only then rounded."""
    given = (ids[:, :, None] == ids[:, None, :]) * g_ids[:, None, :]
    logprobs = jnp.maximum(logprobs, LOG_ZERO)
    values = jnp.exp(logprobs) * (offset[:, None] - g_entropy[:, None] * logprobs) + given.sum(-1)
    rows = jnp.arange(ids.shape[0])[:, None]
    return d_logits.at[rows, ids].set(values.astype(d_logits.dtype), mode="drop")
