"""Bytes of one device's memory, by kind.

What is held between programs (weights, adapter, gradients, optimizer, batch) is counted from the specs and the sharding
rules, exactly. What a program holds while it runs is a model of its largest arrays: see `temporaries`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from rlx.models.description import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    LatentAttention,
    Layer,
)
from rlx.models.spec import layer_specs
from rlx.parallel.layout import Layout, ticks
from rlx.planning import scoring
from rlx.planning.case import (
    Case,
    batch_shapes,
    dealt,
    flat_specs,
    group_rounds,
    groups,
    numbers,
    numbers_here,
    piped,
    repeats_here,
)

WIDE = 4  # bytes of a float32


class Held(NamedTuple):
    """Bytes that stay on one device between the programs of an update."""

    weights: int  # of the model, as it is held: float32 where it is trained whole
    adapter: int
    gradients: int  # the sum over micro-batches
    optimizer: int
    batch: int  # one micro-batch


def held(case: Case) -> Held:
    base, own = numbers(case)
    adapted = bool(case.config.lora.rank)
    return Held(
        weights=base * (case.itemsize if adapted else WIDE),
        adapter=own * WIDE if adapted else 0,
        gradients=own * WIDE,
        optimizer=2 * own * WIDE,
        batch=batch_bytes(case),
    )


def batch_bytes(case: Case) -> int:
    """Rows over dp, tokens not cut."""
    every = [*batch_shapes(case).values(), *scoring.arrays(case).values()]
    return sum(
        math.prod(sizes) * jnp.dtype(dtype).itemsize // (case.layout.dp if sizes else 1) for dtype, sizes in every
    )


class Temporaries(NamedTuple):
    """Bytes of the largest arrays that the gradient's program holds at once on one device, before they are weighted."""

    kept: float  # of the forward pass, for the backward pass: what `remat` leaves
    layer: float  # what one layer makes of its tokens, recomputed and differentiated
    scores: float  # of one attention layer: float32, queries x keys that exist at once, of a row or of blocks
    heads: float  # queries, keys, values and results of one attention layer that goes by blocks, float32
    exchange: float  # blocks of tokens on their way to experts
    recurrent: float  # queries, keys, values and decays of one delta rule layer, float32
    logits: float  # one tile of the output head, float32
    head: float  # hidden states of the targets
    gradients: float  # of this micro-batch
    gathered: float  # weights that are cut over dp at rest, of the layers of one loop
    cast: float  # weights trained in float32, in the model's dtype
    dealt: float  # weights in the order of a circular pipeline's blocks


def temporaries(case: Case, accelerator: bool = True) -> Temporaries:
    layers = [slot.layer for group in groups(case) for slot in group]
    base, own = numbers(case)
    whole = not case.config.lora.rank
    return Temporaries(
        kept=kept_bytes(case),
        layer=max(_made(case, layer) for layer in layers) * _tokens(case),
        scores=max(_scores(case, layer, accelerator) for layer in layers),
        heads=max(_heads(case, layer, accelerator) for layer in layers),
        exchange=max(_exchange(case, layer) for layer in layers),
        recurrent=max(_recurrent(case, layer) for layer in layers),
        logits=_tile(case, accelerator),
        head=case.rows * case.targets / (case.layout.devices / case.layout.tp) * case.arch.hidden_size * WIDE,
        gradients=own * WIDE,
        gathered=_gathered(case),
        cast=base * case.itemsize if whole and case.itemsize < WIDE else 0,
        dealt=sum(dealt(case, group).copied for group in groups(case)),
    )


def _tokens(case: Case) -> float:
    """That a device computes at once."""
    return case.rows_here * case.tokens_here


def stream_bytes(case: Case) -> float:
    """What goes from layer to layer for each token, on one device: the residual stream, or the bank with it."""
    block = case.arch.residual_block
    copies = 1 if block is None else 1 + math.ceil(case.arch.num_layers / block)
    return copies * case.arch.hidden_size * case.itemsize


def kept_bytes(case: Case) -> float:
    total = 0.0
    for group in groups(case):
        each = sum(_kept(case, slot.layer) for slot in group) * _tokens(case)
        rounds = group_rounds(case, group)
        times = ticks(case.layout, case.parts, rounds) if piped(case, group) else case.parts
        total += each * repeats_here(case, group) / rounds * times
    return total


def _kept(case: Case, layer: Layer) -> float:
    """Bytes a token that a layer keeps for its backward pass."""
    stream = stream_bytes(case) / case.stream_parts
    if case.remat == "layer":
        return stream
    return stream + (1 if case.remat == "products" else 2) * _made(case, layer)


def _made(case: Case, layer: Layer) -> float:
    """Bytes a token on one device of what a layer's products make; those that TP cuts, cut."""
    total = 0.0
    for path, spec in flat_specs(case.arch, layer).items():
        routed = path[:2] == ("mlp", "experts")
        if (path[-1] != "kernel" and not routed) or (routed and case.layout.devices > 1):  # `_exchange`
            continue
        inward = spec.axes[-1] in ("embed", "latent_mlp")
        copies = layer.mlp.top_k if routed and isinstance(layer.mlp, Experts) else 1
        total += copies * spec.shape[-1] / (1 if routed else case.stream_parts if inward else case.layout.tp)
    return total * case.itemsize


def _scores(case: Case, layer: Layer, accelerator: bool) -> float:
    if not isinstance(layer.mixer, Attention | LatentAttention):
        return 0.0
    at_once = case.attention_block(accelerator) ** 2 or case.tokens_here * case.seen
    return case.rows_here * layer.mixer.heads / case.layout.tp * at_once * WIDE


def _heads(case: Case, layer: Layer, accelerator: bool) -> float:
    """Where a row's scores are held whole, all of this is little next to them."""
    mixer, tp, shape = layer.mixer, case.layout.tp, case.config.learner.row_shape
    if not case.attention_block(accelerator) and shape is None:
        return 0.0
    match mixer:
        case Attention():
            key_heads, width = max(mixer.kv_heads / tp, 1), 2 * mixer.head_dim
        case LatentAttention():
            key_heads, width = mixer.heads / tp, mixer.nope_dim + mixer.rope_dim + mixer.value_dim
        case _:
            return 0.0
    if shape is not None:
        seen: float = shape.keys(case.tokens)
    else:
        seen = case.tokens_here if case.ring else case.tokens
    return case.rows_here * (case.tokens_here * mixer.heads / tp + seen * key_heads) * width * WIDE


def _exchange(case: Case, layer: Layer) -> float:
    """`rlx.parallel.expert`, which keeps nothing for the backward pass: a block for each device, large enough for all
    that this one could send there."""
    feed, layout = layer.mlp, case.layout
    if not isinstance(feed, Experts) or layout.devices == 1:
        return 0.0
    tokens = _tokens(case) / layout.tp
    rows = tokens * (layout.ep * min(feed.top_k, feed.count // layout.ep) if layout.ep > 1 else feed.top_k)
    return rows * ((feed.latent or case.arch.hidden_size) + 2 * feed.width) * case.itemsize


def _recurrent(case: Case, layer: Layer) -> float:
    """Queries, keys, values and decays of a device's tokens; over cp the values have a state's columns beside theirs,
    from which the map of a part comes (`rlx.models.sharded_recurrence`)."""
    mixer, layout = layer.mixer, case.layout
    if isinstance(mixer, DeltaNet):
        heads, key = mixer.value_heads, mixer.key_dim
        width = heads * (2 * key + 2 * mixer.value_dim)
        cut = mixer.key_heads % layout.tp == 0 and heads % layout.tp == 0
    elif isinstance(mixer, KimiDelta):
        heads, key = mixer.heads, mixer.head_dim
        width = heads * key * 5
        cut = heads % layout.tp == 0
    else:
        return 0.0
    width += 2 * heads * key if layout.cp > 1 else 0
    return _tokens(case) * width / (layout.tp if cut else 1) * WIDE


def _tile(case: Case, accelerator: bool) -> float:
    """Of `rlx_kernels.logprob`: at most 1 GiB of logits at once, on a CPU 16 MiB."""
    here = case.rows * case.targets / (case.layout.devices / case.layout.tp)
    tokens, most = (16384, 1 << 30) if accelerator else (1024, 16 << 20)
    return min(min(here, tokens) * case.arch.vocab_size / case.layout.tp * WIDE, most)


def _gathered(case: Case) -> float:
    """Of the largest layer."""
    if case.layout.dp == 1:
        return 0.0
    layout = case.layout
    whole = Layout(tp=layout.tp, ep=layout.ep if layout.expert_axes == ("tp",) else 1)
    layers = {slot.layer for group in groups(case) for slot in group}
    return max(_of_layer(case.arch, layer, whole) for layer in layers) * case.itemsize


@functools.lru_cache(maxsize=512)
def _of_layer(arch: Architecture, layer: Layer, layout: Layout) -> int:
    return numbers_here(layer_specs(arch, layer), arch, layout)
