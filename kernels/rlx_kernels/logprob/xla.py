"""The log-prob head in plain XLA, on any backend: a scan over chunks of tokens, logits recomputed in the backward pass.

A chunk of tokens owns every column of the vocabulary, so candidates are a gather forwards and a scatter-add backwards,
and the gradient of each hidden state is written once. Per token, with z the logits and m their maximum:

    s = Σ e^(z-m)    u = Σ e^(z-m) (z-m)    logsumexp L = m + log s    entropy H = log s - u/s    log p_v = z_v - L

and, for cotangents g_L, g_H and g_j of the log-prob of id_j (the target is one of the ids),

    dz_v = p_v (g_L - Σ_j g_j - g_H (log p_v + H)) + Σ_j g_j [v = id_j]

so that (L, H) is all the backward pass keeps beside the inputs. The moments are taken about m: about 0, H would be the
difference of two large numbers.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from rlx_kernels.logprob.reference import TokenStats

MIN_CHUNK = 64  # tokens; with fewer, reading the head dominates
LOGITS_BUDGET = {"cpu": 128 << 20}  # bytes of float32 logits a chunk may hold
ACCELERATOR_LOGITS_BUDGET = 1 << 30
# e^-200 is 0 in float32, so clamping here changes no value; it keeps 0 · (-inf) out
LOG_ZERO = -200.0
SUM_BLOCK = 256  # columns


def unsupported_reason(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, candidates: jax.Array | None, vocab_axis: str | None
) -> str | None:
    if vocab_axis is not None and vocab_axis not in _varying(head):
        return (
            f"head does not vary over vocab_axis={vocab_axis!r}: shard its rows over that axis in shard_map's in_specs "
            "and leave check_vma=True, from which the backward pass knows where to sum"
        )
    return None


def default_chunk(vocab: int, platform: str) -> int:
    """Tokens of a chunk: a multiple of 64 whose logits fit the platform's budget, at least 64."""
    budget = LOGITS_BUDGET.get(platform, ACCELERATOR_LOGITS_BUDGET)
    return max(budget // (4 * vocab) // MIN_CHUNK, 1) * MIN_CHUNK


def token_stats(
    hidden: Float[Array, "tokens width"],
    head: Float[Array, "vocab width"],
    targets: Int[Array, "tokens"],
    candidates: Int[Array, "tokens candidates"] | None,
    *,
    temperature: float,
    vocab_axis: str | None,
    chunk: int | None = None,
) -> TokenStats:
    """`rlx_kernels.logprob.token_stats` in the memory of one chunk's logits; `chunk` tokens, None = `default_chunk`."""
    tokens = hidden.shape[0]
    ids = targets[:, None] if candidates is None else jnp.concatenate([targets[:, None], candidates], 1)
    most = default_chunk(head.shape[0], jax.default_backend()) if chunk is None else chunk
    chunks = -(-tokens // most)
    size = -(-tokens // chunks)  # chunks of equal size: fewer than `chunks` tokens are padding

    def split(x):
        return jnp.pad(x, ((0, chunks * size - tokens), (0, 0))).reshape(chunks, size, x.shape[1])

    stats = _chunked_stats(_Options(float(temperature), vocab_axis), split(hidden), head, split(ids))
    logprobs, logsumexp, entropy = (x.reshape(chunks * size, *x.shape[2:])[:tokens] for x in stats)
    return TokenStats(logprobs[:, 0], logsumexp, entropy, None if candidates is None else logprobs[:, 1:])


class _Options(NamedTuple):
    temperature: float
    vocab_axis: str | None


class _Stats(NamedTuple):
    """N chunks of C tokens with J ids each."""

    logprobs: jax.Array  # [N, C, J]
    logsumexp: jax.Array  # [N, C]
    entropy: jax.Array  # [N, C]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "head", "ids", "logsumexp", "entropy"],
    meta_fields=["hidden_trains", "head_trains"],
)
@dataclasses.dataclass(frozen=True)
class _Residuals:
    hidden: jax.Array  # [N, C, D]
    head: jax.Array  # [V, D]
    ids: jax.Array  # [N, C, J]
    logsumexp: jax.Array  # [N, C]
    entropy: jax.Array  # [N, C]
    hidden_trains: bool
    head_trains: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_stats(options, hidden, head, ids):
    local, known = _local_ids(ids, head.shape[0], options.vocab_axis)
    top, mass, moment, picked = lax.map(lambda x: _chunk_moments(options, x[0], head, x[1]), (hidden, local))
    if options.vocab_axis is not None:
        top, mass, moment, picked = _merge_shards(options.vocab_axis, top, mass, moment, picked)
    log_mass = jnp.log(mass)
    logprobs = (picked - top[..., None]) - log_mass[..., None]
    return _Stats(jnp.where(known, logprobs, jnp.nan), top + log_mass, log_mass - moment / mass)


def _forward(options, hidden, head, ids):
    stats = _chunked_stats(options, hidden.value, head.value, ids.value)
    kept = (hidden.value, head.value, ids.value, stats.logsumexp, stats.entropy)
    return stats, _Residuals(*kept, hidden_trains=hidden.perturbed, head_trains=head.perturbed)


def _backward(options, kept, cotangents):
    given = [_instantiate(g) / options.temperature for g in cotangents]
    axes = _varying(kept.hidden, kept.head, *given)
    g_ids, g_logsumexp, g_entropy = given
    offset = g_logsumexp - g_ids.sum(-1) - g_entropy * kept.entropy
    local, _ = _local_ids(kept.ids, kept.head.shape[0], options.vocab_axis)
    complete = set(axes) <= set(_varying(kept.hidden))  # else d_hidden is one shard's part of a sum

    def step(d_head, x):
        hidden, *rows = x
        d_logits = _chunk_d_logits(options, hidden, kept.head, *rows).astype(kept.head.dtype)
        if kept.head_trains:
            d_head += _product(d_logits, hidden, 0, 0)
        if not kept.hidden_trains:
            return d_head, None
        d_hidden = _product(d_logits, kept.head, 1, 0)
        return d_head, d_hidden.astype(hidden.dtype) if complete else d_hidden

    start = _zeros(kept.head.shape, axes) if kept.head_trains else None
    rows = (local, kept.logsumexp, offset, g_entropy, g_ids)
    d_head, d_hidden = lax.scan(step, start, (kept.hidden, *rows))
    return _as_cotangent(d_hidden, kept.hidden), _as_cotangent(d_head, kept.head), None


_chunked_stats.defvjp(_forward, _backward, symbolic_zeros=True)


def _chunk_moments(options, hidden, head, ids):
    logits = _product(hidden, head, 1, 1) / options.temperature
    top = jnp.maximum(logits.max(1), jnp.finfo(logits.dtype).min)
    mass, moment = _moments(logits, top)
    return top, mass, moment, jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=0)


def _moments(logits, top):
    """(Σ e^c, Σ c e^c) over the columns, c = logits - top.

    Summed in blocks: a CPU adds a long row up one by one, and over 50,000 columns float32 then loses 1e-4 of the sum.
    """
    rows, columns = logits.shape
    whole = columns - columns % SUM_BLOCK
    sums = []
    for part in (logits[:, :whole].reshape(rows, -1, SUM_BLOCK), logits[:, None, whole:]):
        if part.size:
            centred = jnp.maximum(part - top[:, None, None], LOG_ZERO)
            weights = jnp.exp(centred)
            zero = jnp.zeros((), logits.dtype)
            # one reduction of two operands: two reductions would each compute the exponentials
            added = lax.reduce((weights, weights * centred), (zero, zero), _add_both, (2,))
            sums.append((added[0].sum(1), added[1].sum(1)))
    return sum(mass for mass, _ in sums), sum(moment for _, moment in sums)


def _add_both(a, b):
    return a[0] + b[0], a[1] + b[1]


def _chunk_d_logits(options, hidden, head, ids, logsumexp, offset, g_entropy, g_ids):
    logits = _product(hidden, head, 1, 1) / options.temperature
    logprobs = jnp.maximum(logits - logsumexp[:, None], LOG_ZERO)
    d_logits = jnp.exp(logprobs) * (offset[:, None] - g_entropy[:, None] * logprobs)
    return d_logits.at[jnp.arange(ids.shape[0])[:, None], ids].add(g_ids, mode="drop")


def _merge_shards(vocab_axis, top, mass, moment, picked):
    """The moments of the whole vocabulary from those of this shard: a maximum and one packed sum over the axis."""
    whole_top = lax.pmax(top, vocab_axis)
    shift = jnp.maximum(top - whole_top, LOG_ZERO)
    scale = jnp.exp(shift)
    moments = jnp.stack([scale * mass, scale * (moment + shift * mass)], axis=-1)
    packed = lax.psum(jnp.concatenate([moments, picked], -1), vocab_axis)
    return whole_top, packed[..., 0], packed[..., 1], packed[..., 2:]


def _local_ids(ids, shard_vocab, vocab_axis):
    """(column of this shard or `shard_vocab`, which gathers fill and scatters drop; is the id in the vocabulary)"""
    shards, shard = (1, 0) if vocab_axis is None else (lax.axis_size(vocab_axis), lax.axis_index(vocab_axis))
    local = ids - shard * shard_vocab
    inside = (local >= 0) & (local < shard_vocab)
    return jnp.where(inside, local, shard_vocab), (ids >= 0) & (ids < shards * shard_vocab)


def _product(a, b, a_axis, b_axis):
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _instantiate(cotangent):
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _as_cotangent(x, primal):
    """Sum over the manual axes the gradient varies over and its primal does not: data axes, or the vocabulary's."""
    if x is None:
        return None
    axes = tuple(a for a in _varying(x) if a not in _varying(primal))
    return (lax.psum(x, axes) if axes else x).astype(primal.dtype)


def _zeros(shape, axes):
    zeros = jnp.zeros(shape, jnp.float32)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _varying(*arrays) -> tuple[str, ...]:
    """The manual mesh axes over which any of the arrays varies, as shard_map tracks them."""
    return tuple(sorted({axis for x in arrays for axis in jax.typeof(x).manual_axis_type.varying}))
