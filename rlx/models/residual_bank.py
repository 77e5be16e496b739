"""Attention residuals (Kimi K3): a layer reads a mixture of snapshots of the stream, not the stream alone.

The stream is a running sum; every `block` layers it is put into a bank and begun anew. What a sublayer reads is a
softmax mixture of the bank and the sum, weighted by a learned score of each entry. The bank is an array of fixed size,
so that a scan over layers and a pipeline's stages can carry it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from rlx.models.layers import wide


@struct.dataclass
class Bank:
    snapshots: Array  # [snapshots, rows, t, d], those from `count` on are not there yet
    count: Array  # int32 []
    stream: Array  # [rows, t, d], the sum since the last snapshot


def begin(hidden: Float[Array, "rows t d"], num_layers: int, block: int) -> Bank:
    """An empty bank for a model of so many layers, with the embeddings as the stream."""
    snapshots = jnp.zeros((math.ceil(num_layers / block), *hidden.shape), hidden.dtype)
    return Bank(snapshots, jnp.int32(0), hidden)


def mix(bank: Bank, norm: Float[Array, " d"], score: Float[Array, " d"], eps: float) -> Float[Array, "rows t d"]:
    """Σ_j softmax_j(score · norm ∘ v_j / rms(v_j)) v_j over the snapshots and the stream; in float32, then cast.

    The entries themselves are summed as they are; only their scores see them normalised.
    """
    entries = wide(jnp.concatenate([bank.snapshots, bank.stream[None]]))
    lengths = jax.lax.rsqrt(jnp.mean(entries * entries, axis=-1) + eps)
    scores = (entries @ (wide(norm) * wide(score))) * lengths
    there = jnp.append(jnp.arange(len(bank.snapshots)) < bank.count, True)
    gains = jax.nn.softmax(jnp.where(there[:, None, None], scores, -jnp.inf), axis=0)
    return jnp.einsum("jrt,jrtd->rtd", gains, entries).astype(bank.stream.dtype)


def snapshot(bank: Bank, layer: Int[Array, ""] | int, block: int) -> Bank:
    """At every `block`-th layer, before its mixer is added: the stream goes into the bank and begins anew."""
    due = jnp.asarray(layer) % block == 0
    place = jnp.where(due, bank.count, len(bank.snapshots))  # beyond the end: dropped
    snapshots = bank.snapshots.at[place].set(bank.stream, mode="drop")
    return Bank(snapshots, bank.count + due, jnp.where(due, 0, bank.stream))


def added(bank: Bank, y: Float[Array, "rows t d"]) -> Bank:
    return dataclasses.replace(bank, stream=bank.stream + y)
