"""What every implementation of the log-prob head shares: tiles, the merging of moments, and the gradient.

A backend knows one tile of the logits, hidden [C, D] times a block of the head [B, D]: its moments forwards, its
gradient backwards. Per token, with z the logits and m their maximum,

    s = Σ e^(z-m)    u = Σ e^(z-m) (z-m)    logsumexp L = m + log s    entropy H = log s - u/s    log p_v = z_v - L

and, for cotangents g_L, g_H and g_j of the log-prob of id_j (the target is one of the ids),

    dz_v = p_v (g_L - Σ_j g_j - g_H (log p_v + H)) + Σ_j g_j [v = id_j]

so that the outputs are all the backward pass keeps beside the inputs; it computes the logits again. The moments are
taken about m: about 0, H would be the difference of two large numbers. Backwards the blocks of the vocabulary are the
outer loop: each block of the head's gradient is then finished at once, in the head's dtype, and what is alive is a
tile, whatever the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob.precision import Precision, product, sum_dtype
from rlx_kernels.logprob.reference import TokenStats
from rlx_kernels.logprob.tiling import Tile, columns_within, flat, full, in_chunks, over_blocks, put_rows, rows, varying

# e^-200 is 0 in float32, so clamping here changes no value; it keeps 0 · (-inf) out
LOG_ZERO = -200.0
LOWEST = float(jnp.finfo(jnp.float32).min)


class Moments(NamedTuple):
    """Of C tokens over some columns. `top` may be any number near the maximum, never -inf."""

    top: jax.Array  # [C]
    mass: jax.Array  # [C] Σ e^(z - top)
    moment: jax.Array  # [C] Σ e^(z - top) (z - top)
    picked: jax.Array  # [C, J] the logit of each id, 0 where its column is not among these


class Backend(NamedTuple):
    """Module-level functions: it is static under jit. ids are columns of the block, B where they are elsewhere."""

    moments: Callable[..., Moments]  # (options, hidden [C, D], head [B, D], ids [C, J])
    # (options, hidden, head, ids, logprobs [C, J], logsumexp, offset, g_entropy [C], g_ids [C, J]) -> dz [C, B]:
    # p (offset - g_entropy log p) and g_ids added at the ids
    d_logits: Callable[..., jax.Array]
    tile: Callable[[int, int, bool], Tile]  # (tokens, vocab, backward)


class Options(NamedTuple):
    backend: Backend
    temperature: float
    vocab_axis: str | None
    precision: Precision
    platform: str  # "cpu", "gpu", "tpu": what to lay the program out for


class Stats(NamedTuple):
    """T tokens with J ids each."""

    logprobs: jax.Array  # [T, J]
    logsumexp: jax.Array  # [T]
    entropy: jax.Array  # [T]


def token_stats(
    backend: Backend,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float,
    vocab_axis: str | None,
    precision: Precision,
    platform: str,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` with the tiles of `backend`."""
    options = Options(backend, float(temperature), vocab_axis, precision, platform)
    stats = called(options, hidden, head, stacked_ids(targets, candidates))
    return as_token_stats(stats, candidates is not None)


def called(options: Options, hidden: jax.Array, head: jax.Array, ids: jax.Array) -> Stats:
    try:
        return all_stats(options, hidden, head, ids)
    except RuntimeError as error:
        if not runs_shard_map_without_jit(error):
            raise
        return jax.jit(all_stats, static_argnums=0)(options, hidden, head, ids)


def runs_shard_map_without_jit(error: RuntimeError) -> bool:
    """Outside of jit shard_map has no rule for symbolic zeros, neither for a value nor inside of a forward pass."""
    return "symbolic_zeros support with shard_map" in str(error)


def stacked_ids(targets, candidates):
    return targets[:, None] if candidates is None else jnp.concatenate([targets[:, None], candidates], 1)


def as_token_stats(stats: Stats, has_candidates: bool) -> TokenStats:
    candidates = stats.logprobs[:, 1:] if has_candidates else None
    return TokenStats(stats.logprobs[:, 0], stats.logsumexp, stats.entropy, candidates)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "head", "ids", "stats"],
    meta_fields=["hidden_trains", "head_trains"],
)
@dataclasses.dataclass(frozen=True)
class _Residuals:
    hidden: jax.Array  # [T, D]
    head: jax.Array  # [V, D]
    ids: jax.Array  # [T, J]
    stats: Stats
    hidden_trains: bool
    head_trains: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def all_stats(options, hidden, head, ids):
    tokens, vocab = hidden.shape[0], head.shape[0]
    tile = options.backend.tile(tokens, vocab, False)
    axes = varying(hidden, head, ids)
    local, known = local_ids(ids, vocab, options.vocab_axis)

    def chunk(x):
        hidden, ids = x
        nothing = nothing_seen(options, ids.shape, axes)

        def block(start, count, seen):
            columns = columns_within(ids, start, count)
            moments = options.backend.moments(options, hidden, rows(head, start, count), columns)
            return moments if seen is None else merge(seen, moments)

        return over_blocks(vocab, tile.columns, block, None if vocab <= tile.columns else nothing)

    moments = lax.map(chunk, in_chunks(tile.tokens, (hidden, local)))
    return finish(options, Moments(*(flat(x, tokens) for x in moments)), known)


def _forward(options, hidden, head, ids):
    stats = all_stats(options, hidden.value, head.value, ids.value)
    kept = (hidden.value, head.value, ids.value, stats)
    return stats, _Residuals(*kept, hidden_trains=hidden.perturbed, head_trains=head.perturbed)


def _backward(options, kept, cotangents):
    tokens, vocab = kept.hidden.shape[0], kept.head.shape[0]
    tile, wide = options.backend.tile(tokens, vocab, True), sum_dtype(options.precision)
    given = Stats(*(instantiate(g) for g in cotangents))
    axes = varying(kept.hidden, kept.head, *given)
    local, known = local_ids(kept.ids, vocab, options.vocab_axis)
    of_rows = d_logits_rows(options, kept.stats, given, known)
    hidden, ids, *given = in_chunks(tile.tokens, (kept.hidden, local, *of_rows))
    chunks = (jnp.arange(hidden.shape[0]), hidden, across(options, hidden) if kept.head_trains else None, ids, *given)

    def block(start, count, totals):
        d_hidden, d_head = totals
        weights = rows(kept.head, start, count)

        def chunk(carry, x):
            d_hidden, d_block = carry
            i, hidden, hidden_across, ids, *given = x
            columns = columns_within(ids, start, count)
            d_logits = options.backend.d_logits(options, hidden, weights, columns, *given)
            if kept.hidden_trains:
                part = d_hidden[i] + product(d_logits, weights, 1, 0, options.precision)
                d_hidden = lax.dynamic_update_index_in_dim(d_hidden, part, i, 0)
            if kept.head_trains:
                d_block += head_product(options, d_logits, hidden_across)
            return (d_hidden, d_block), None

        shape = head_product_shape(options, kept.head[:count].shape)
        d_block = full(shape, 0, axes, wide) if kept.head_trains else None
        (d_hidden, d_block), _ = lax.scan(chunk, (d_hidden, d_block), chunks)
        if d_block is not None:
            d_head = put_rows(d_head, head_product_done(options, d_block), start)
        return d_hidden, d_head

    d_hidden = full(hidden.shape, 0, axes, wide) if kept.hidden_trains else None
    d_head = full(kept.head.shape, 0, axes, summed_dtype(kind(kept.head), axes)) if kept.head_trains else None
    d_hidden, d_head = over_blocks(vocab, tile.columns, block, (d_hidden, d_head))
    d_hidden = flat(d_hidden, tokens) if kept.hidden_trains else None
    return as_cotangent(d_hidden, kind(kept.hidden)), as_cotangent(d_head, kind(kept.head)), None


all_stats.defvjp(_forward, _backward, symbolic_zeros=True)


def nothing_seen(options: Options, ids_shape: tuple[int, int], axes: tuple[str, ...]) -> Moments:
    rows, dtype = ids_shape[:1], sum_dtype(options.precision)
    top, mass, moment = (full(rows, value, axes, dtype) for value in (LOWEST, 0, 0))
    return Moments(top, mass, moment, full(ids_shape, 0, axes, dtype))


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of two sets of columns together."""
    top = jnp.maximum(a.top, b.top)
    (mass_a, moment_a), (mass_b, moment_b) = _about(top, a), _about(top, b)
    return Moments(top, mass_a + mass_b, moment_a + moment_b, a.picked + b.picked)


def finish(options: Options, moments: Moments, known: Array) -> Stats:
    """The statistics of the whole vocabulary: over shards a maximum and one packed sum."""
    if options.vocab_axis is not None:
        top = lax.pmax(moments.top, options.vocab_axis)
        packed = jnp.concatenate([jnp.stack(_about(top, moments), axis=-1), moments.picked], -1)
        packed = lax.psum(packed, options.vocab_axis)
        moments = Moments(top, packed[..., 0], packed[..., 1], packed[..., 2:])
    log_mass = jnp.log(moments.mass)
    logprobs = (moments.picked - moments.top[:, None]) - log_mass[:, None]
    entropy = log_mass - moments.moment / moments.mass
    return Stats(jnp.where(known, logprobs, jnp.nan), moments.top + log_mass, entropy)


def _about(top, moments):
    """(mass, moment) about another top."""
    shift = jnp.maximum(moments.top - top, LOG_ZERO)
    scale = jnp.exp(shift)
    return scale * moments.mass, scale * (moments.moment + shift * moments.mass)


def d_logits_rows(options: Options, stats: Stats, cotangents: Stats, known: Array):
    """What `Backend.d_logits` is given of each row; the cotangents are those of the logits before the temperature."""
    g_ids, g_logsumexp, g_entropy = (g / options.temperature for g in cotangents)
    g_ids = jnp.where(known, g_ids, 0)  # the NaN of an id that is not in the vocabulary depends on no logit
    offset = g_logsumexp - g_ids.sum(-1) - g_entropy * stats.entropy
    return stats.logprobs, stats.logsumexp, offset, g_entropy, g_ids


# The gradient of the head is d_logitsᵀ [B, C] hidden [C, D]. The matrix library of a CPU reads an operand along the
# wrong axis at half its rate, so there the small one is turned once and the product comes out turned, as [D, B].


def across(options: Options, hidden: Float[Array, "*chunks size width"]) -> jax.Array:
    return lax.optimization_barrier(hidden.mT) if options.platform == "cpu" else hidden


def head_product(options: Options, d_logits: Float[Array, "size block"], hidden_across: Float[Array, "_ _"]):
    if options.platform == "cpu":
        return product(hidden_across, d_logits, 1, 0, options.precision)
    return product(d_logits, hidden_across, 0, 0, options.precision)


def head_product_shape(options: Options, shape: tuple[int, int]) -> tuple[int, int]:
    return shape[::-1] if options.platform == "cpu" else shape


def head_product_done(options: Options, d_block: Float[Array, "_ _"]) -> Float[Array, "block width"]:
    return lax.optimization_barrier(d_block).T if options.platform == "cpu" else d_block


def local_ids(ids: Int[Array, "tokens ids"], shard_vocab: int, vocab_axis: str | None):
    """(column of this shard, `shard_vocab` where it is elsewhere; is the id in the vocabulary)"""
    shards, shard = (1, 0) if vocab_axis is None else (lax.axis_size(vocab_axis), lax.axis_index(vocab_axis))
    known = (ids >= 0) & (ids < shards * shard_vocab)
    return columns_within(ids, shard * shard_vocab, shard_vocab), known


def instantiate(cotangent: jax.Array | SymbolicZero) -> jax.Array:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


class Kind(NamedTuple):
    """What a cotangent must be like."""

    dtype: jnp.dtype
    axes: tuple[str, ...]  # manual mesh axes over which the primal varies


def kind(x: jax.Array) -> Kind:
    return Kind(x.dtype, varying(x))


def as_cotangent(x: jax.Array | None, primal: Kind) -> jax.Array | None:
    """Sum over the manual axes the gradient varies over and its primal does not: data axes, or the vocabulary's."""
    if x is None:
        return None
    axes = tuple(a for a in varying(x) if a not in primal.axes)
    return (lax.psum(x, axes) if axes else x).astype(primal.dtype)


def summed_dtype(primal: Kind, axes: tuple[str, ...]) -> jnp.dtype:
    """Of a gradient that varies over `axes`: rounded at once where no other device adds to it."""
    return primal.dtype if set(axes) <= set(primal.axes) else jnp.promote_types(primal.dtype, jnp.float32)
