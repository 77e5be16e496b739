"""The log-prob head in plain XLA, on any backend: `core` with tiles of logits that are written and read again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob import core
from rlx_kernels.logprob.core import LOG_ZERO, LOWEST, Backend, Moments, Options
from rlx_kernels.logprob.precision import Precision, operand_dtype, product
from rlx_kernels.logprob.reference import TokenStats
from rlx_kernels.logprob.tiling import Tile, even_columns

COLUMNS = 256  # a tile has a multiple of them


def unsupported_reason(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    candidates: jax.Array | None,
    vocab_axis: str | None,
    precision: Precision,
) -> str | None:
    if precision == "tensorfloat32" and jax.default_backend() != "gpu":
        return (
            f"precision='tensorfloat32' is a number format of NVIDIA GPUs and the default backend is "
            f"{jax.default_backend()!r}: use 'bfloat16_3x', which is finer, or 'float32'"
        )
    return None


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float,
    vocab_axis: str | None,
    precision: Precision,
    backend: Backend | None = None,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` in the memory of one tile; `backend` may bring a tile of another size."""
    platform = jax.default_backend()
    return core.token_stats(
        default_backend(platform) if backend is None else backend,
        hidden,
        head,
        targets,
        candidates,
        temperature=temperature,
        vocab_axis=vocab_axis,
        precision=precision,
        platform=platform,
    )


def default_backend(platform: str) -> Backend:
    return CPU if platform == "cpu" else ACCELERATOR


def tile_of(tokens: int, vocab: int, most_tokens: int, most_bytes: int) -> Tile:
    """As many tokens as there are, up to `most_tokens`, and the columns whose float32 logits then fit `most_bytes`."""
    tokens = min(tokens, most_tokens)
    columns = max(most_bytes // (4 * tokens) // COLUMNS, 1) * COLUMNS
    return Tile(tokens, even_columns(vocab, columns))


def logits_of(options: Options, hidden: Float[Array, "size width"], head: Float[Array, "block width"]):
    logits = product(hidden, head, 1, 1, options.precision)
    return logits if options.temperature == 1 else logits * (1 / options.temperature)


def moments_of(logits: Float[Array, "size block"], ids: Int[Array, "size ids"]) -> Moments:
    """Moments about the logsumexp L of these columns: their mass is 1, their moment minus their entropy.

    Each reduction is a pass of its own whose exponentials nothing else needs, so that XLA fuses them into it: Σ e^c and
    Σ e^c c of the same c would share, write and read an array of them.
    """
    top = jnp.maximum(logits.max(1), LOWEST)
    mass = jnp.exp(jnp.maximum(logits - top[:, None], LOG_ZERO)).sum(1)
    logsumexp = jnp.maximum(top + jnp.log(mass), LOWEST)
    logprobs = jnp.maximum(logits - logsumexp[:, None], LOG_ZERO)
    moment = (jnp.exp(logprobs) * logprobs).sum(1)
    picked = jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=0)
    return Moments(logsumexp, jnp.ones_like(mass), moment, picked)


def d_logits_of(logits, ids, logsumexp, offset, g_entropy, g_ids) -> Float[Array, "size block"]:
    logprobs = jnp.maximum(logits - logsumexp[:, None], LOG_ZERO)
    d_logits = jnp.exp(logprobs) * (offset[:, None] - g_entropy[:, None] * logprobs)
    return d_logits.at[jnp.arange(ids.shape[0])[:, None], ids].add(g_ids, mode="drop")


def moments(options, hidden, head, ids) -> Moments:
    return moments_of(logits_of(options, hidden, head), ids)


def d_logits(options, hidden, head, ids, logprobs, logsumexp, offset, g_entropy, g_ids):
    gradient = d_logits_of(logits_of(options, hidden, head), ids, logsumexp, offset, g_entropy, g_ids)
    return gradient.astype(operand_dtype(options.precision))


def _cpu_tile(tokens: int, vocab: int, backward: bool) -> Tile:
    return tile_of(tokens, vocab, 1024, 16 << 20)


def _accelerator_tile(tokens: int, vocab: int, backward: bool) -> Tile:
    return tile_of(tokens, vocab, 16384, 1 << 30)


# On a CPU a tile stays in the last cache, and its products are already long enough for the full rate.
CPU = Backend(moments, d_logits, _cpu_tile)
ACCELERATOR = Backend(moments, d_logits, _accelerator_tile)
