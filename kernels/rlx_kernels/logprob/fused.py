"""A loss of the log-prob head with its gradient taken in the forward pass: two products a frozen head, not three.

`token_stats` must compute the logits twice, because the cotangents of its outputs are known only when the whole loss
is. Where the loss is a sum over tokens, loss = Σ_t f_t(stats_t), the cotangents of a chunk of tokens follow from that
chunk alone: its logits are computed once, f is differentiated, and the products with the gradient of the logits follow
at once. The backward pass multiplies by the cotangent of the loss. Exact; the same idea for cross-entropy is in Liger
Kernel (arXiv 2410.10989).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob import core, xla
from rlx_kernels.logprob.core import Kind, Options, Stats, kind
from rlx_kernels.logprob.precision import Precision, operand_dtype, product
from rlx_kernels.logprob.reference import TokenStats
from rlx_kernels.logprob.tiling import columns_within, full, over_blocks, put_rows, rows, varying

# Of a chunk's float32 logits; a chunk owns every column, so it has at least MIN_TOKENS tokens and grows with V below.
CHUNK_BYTES = {"cpu": 256 << 20}
ACCELERATOR_CHUNK_BYTES = 4 << 30
MIN_TOKENS = 64

LossFunction = Callable[[TokenStats, Any], Float[Array, ""]]


def chunk_tokens(tokens: int, vocab: int, platform: str) -> int:
    most = CHUNK_BYTES.get(platform, ACCELERATOR_CHUNK_BYTES) // (4 * vocab)
    rows_of_tile = xla.default_backend(platform).tile(tokens, vocab, True).tokens
    return min(max(most // MIN_TOKENS, 1) * MIN_TOKENS, rows_of_tile, tokens)


@dataclasses.dataclass(frozen=True)
class _Static:
    options: Options
    loss_fn: LossFunction
    chunk: int
    has_candidates: bool


def token_loss(
    loss_fn: LossFunction,
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, " tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    arguments: Any,
    *,
    temperature: float,
    vocab_axis: str | None,
    precision: Precision,
    chunk: int | None = None,
) -> tuple[Float[Array, ""], TokenStats]:
    """`rlx_kernels.logprob.token_loss` in chunks of at most `chunk` tokens."""
    platform = jax.default_backend()
    options = Options(xla.default_backend(platform), float(temperature), vocab_axis, precision, platform)
    size = chunk_tokens(hidden.shape[0], head.shape[0], platform) if chunk is None else chunk
    static = _Static(options, loss_fn, size, candidates is not None)
    ids = core.stacked_ids(targets, candidates)
    loss, stats = _called(static, hidden, head, ids, lax.stop_gradient(arguments))
    return loss, lax.stop_gradient(core.as_token_stats(stats, candidates is not None))


def _called(static, hidden, head, ids, arguments):
    try:
        return _token_loss(static, hidden, head, ids, arguments)
    except jax.errors.UnexpectedTracerError as error:
        raise ValueError(
            "loss_fn closes over an array that is differentiated (or is left from another trace), which would get no "
            "gradient: pass it in `arguments`, which are constants, or use token_stats"
        ) from error
    except RuntimeError as error:
        if not core.runs_shard_map_without_jit(error):
            raise
        stats = core.called(static.options, hidden, head, ids)  # not in jit: loss_fn may close over traced arrays
        return _loss(static, stats, arguments), stats


@functools.partial(jax.tree_util.register_dataclass, data_fields=["d_hidden", "d_head"], meta_fields=["hidden", "head"])
@dataclasses.dataclass(frozen=True)
class _Residuals:
    d_hidden: jax.Array | None  # [T, D], for a loss whose cotangent is 1; None where hidden is not differentiated
    d_head: jax.Array | None  # [V, D]
    hidden: Kind
    head: Kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_loss(static, hidden, head, ids, arguments):
    stats = core.all_stats(static.options, hidden, head, ids)
    return _loss(static, stats, arguments), stats


def _loss(static, stats, arguments):
    loss = static.loss_fn(core.as_token_stats(stats, static.has_candidates), arguments)
    if not isinstance(loss, jax.Array):
        raise ValueError(
            f"loss_fn gave {loss!r}, a {type(loss).__name__}; it must return one float32 scalar array, the sum of the "
            "loss over its tokens: metrics come from the statistics that token_loss returns"
        )
    if loss.shape or loss.dtype != jnp.float32:
        raise ValueError(
            f"loss_fn gave {loss.dtype}{list(loss.shape)}; it must sum over its tokens to a float32 scalar: end it "
            "with .sum(), and with .astype(jnp.float32) where it computes in another dtype"
        )
    if static.options.vocab_axis in varying(loss):
        raise ValueError(
            f"loss_fn's value varies over vocab_axis={static.options.vocab_axis!r}, the statistics do not: give it "
            "arguments that are the same on every shard of the vocabulary"
        )
    return loss


def _forward(static, hidden, head, ids, arguments):
    trains = hidden.perturbed, head.perturbed
    hidden, head, ids, arguments = jax.tree.map(lambda x: x.value, (hidden, head, ids, arguments))
    options, vocab_axis = static.options, static.options.vocab_axis
    local, known = core.local_ids(ids, head.shape[0], vocab_axis)

    def chunk(start, count, totals):
        stats, d_hidden, d_head = totals
        cut = functools.partial(jax.tree.map, lambda x: rows(x, start, count) if x.ndim else x)
        logits, moments = _logits(options, cut(hidden), head, cut(local))
        part = core.finish(options, moments, cut(known))
        loss, pull = jax.vjp(lambda stats: _loss(static, stats, cut(arguments)), part)
        given = core.d_logits_rows(options, part, pull(full((), 1, varying(loss)))[0], cut(known))
        only = count == hidden.shape[0]  # this chunk has all tokens: nothing to add to
        d_rows, d_head = _gradients(options, trains, d_head, cut(hidden), head, logits, cut(local), given, only)
        stats = jax.tree.map(lambda whole, part: put_rows(whole, part, start), stats, part)
        return stats, put_rows(d_hidden, d_rows, start) if trains[0] else None, d_head

    axes = varying(hidden, head, ids, *jax.tree.leaves(arguments))
    of_rows = tuple(a for a in varying(hidden, head) if a != vocab_axis)
    of_ids = tuple(a for a in varying(hidden, head, ids) if a != vocab_axis)
    rows_shape = hidden.shape[:1]
    stats = Stats(full(ids.shape, 0, of_ids), full(rows_shape, 0, of_rows), full(rows_shape, 0, of_rows))
    d_hidden = full(hidden.shape, 0, axes, core.summed_dtype(kind(hidden), axes)) if trains[0] else None
    d_head = full(head.shape, 0, axes) if trains[1] else None
    stats, d_hidden, d_head = over_blocks(hidden.shape[0], static.chunk, chunk, (stats, d_hidden, d_head))
    if trains[1]:
        d_head = d_head.astype(core.summed_dtype(kind(head), axes))
    return (_loss(static, stats, arguments), stats), _Residuals(d_hidden, d_head, kind(hidden), kind(head))


def _blocks(options, tokens, vocab):
    """(start, count) of the blocks of columns, few enough to be written out: a loop would fill and copy the logits."""
    size = options.backend.tile(tokens, vocab, True).columns
    return [(start, min(size, vocab - start)) for start in range(0, vocab, size)]


def _logits(options, hidden, head, ids):
    """(logits [C, B] of each block, the moments of all), taken while a block is in a cache."""
    blocks, seen = [], core.nothing_seen(options, ids.shape, varying(hidden, head, ids))
    for start, count in _blocks(options, hidden.shape[0], head.shape[0]):
        logits = xla.logits_of(options, hidden, rows(head, start, count))
        seen = core.merge(seen, xla.moments_of(logits, columns_within(ids, start, count)))
        blocks.append(logits)
    return blocks, seen


def _gradients(options, trains, d_head, hidden, head, logits, ids, given, only):
    """(gradient of the rows of hidden, d_head with theirs added), in blocks of columns that stay in a cache."""
    across = core.across(options, hidden)
    _, *given = given
    d_hidden = full(hidden.shape, 0, varying(hidden, *logits, *given))
    for (start, count), part in zip(_blocks(options, hidden.shape[0], head.shape[0]), logits, strict=True):
        d_logits = xla.d_logits_of(part, columns_within(ids, start, count), *given)
        d_logits = d_logits.astype(operand_dtype(options.precision))
        if trains[0]:
            d_hidden += product(d_logits, rows(head, start, count), 1, 0, options.precision)
        if trains[1]:
            d_block = core.head_product_done(options, core.head_product(options, d_logits, across))
            d_head = put_rows(d_head, d_block if only else rows(d_head, start, count) + d_block, start)
    return d_hidden if trains[0] else None, d_head


def _backward(static, kept, cotangents):
    scale = core.instantiate(cotangents[0])

    def scaled(x, primal):
        return None if x is None else core.as_cotangent(x.astype(jnp.float32) * scale, primal)

    return scaled(kept.d_hidden, kept.hidden), scaled(kept.d_head, kept.head), None, None


_token_loss.defvjp(_forward, _backward, symbolic_zeros=True)
