"""What an update costs: FLOPs, bytes over each axis of the mesh, seconds.

A product of [n, i] and [i, o] is 2 n i o FLOPs. Attention computes all scores of a row or, where its parts have
places, of a part, seen or not. Exchange and
arithmetic are not assumed to overlap, so seconds are an upper estimate at the given efficiency. Collectives of n
devices are counted as rings: (n - 1) / n of an array are sent by each device to gather or to scatter it, twice that to
sum it everywhere (arXiv 1909.08053, section 3; arXiv 1910.02054, section 7).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from rlx.models.description import (
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    LatentAttention,
    Layer,
    Mixer,
)
from rlx.models.placed import bubble
from rlx.parallel.layout import AXES, ticks
from rlx.planning import scoring
from rlx.planning.case import Case, dealt, flat_specs, group_rounds, groups, numbers, piped, repeats_here
from rlx.planning.hardware import Device
from rlx.planning.memory import WIDE, Held, stream_bytes


class Flops(NamedTuple):
    """Of one token through the model, forward."""

    products: float  # with weights
    attention: float  # scores and their sums, and delta rules
    head: float  # of a target


@dataclasses.dataclass(frozen=True)
class Costs:
    micro_batches: int  # of an update
    tokens: float  # of an update, padding of rows left out
    flops: float  # of an update on all devices, what is recomputed and what frozen policies compute included
    useful_flops: float  # of the trained model's forward and backward pass alone: what MFU counts
    sent: dict[str, float]  # bytes that a device sends over each axis in an update, by the mesh's axis and "ep"
    links: dict[str, str]  # "nvlink" or "network", by the same names
    bubble: float  # share of the pipeline's time that a stage waits
    seconds: dict[str, float]  # of an update, by what they go to

    @property
    def update_seconds(self) -> float:
        return sum(self.seconds.values())

    def mfu(self, device: Device, devices: int, dtype: str) -> float:
        """Model FLOPs utilisation (arXiv 2204.02311, appendix B)."""
        return self.useful_flops / (self.update_seconds * devices * device.flops_of(dtype))


def costs(case: Case, device: Device, stays: Held) -> Costs:
    """`stays`: what the device holds, which the optimizer and every pass over weights read."""
    config, layout = case.config, case.layout
    sequences = config.rollout.tasks_per_update * config.rollout.group_size
    tokens = float(sequences * (config.plan.sequence_tokens or _longest(case)))
    batches = math.ceil(_rows(case, tokens) / case.rows)
    passes = _passes(case)
    waits = bubble(case.arch, layout, case.parts, case.rounds)
    sent = {name: size * batches for name, size in _sent(case, passes).items()}
    links = {name: _link(case, name) for name in sent}
    speed = {"nvlink": device.nvlink, "network": device.network}
    # Weights are read once a pass and part of a pipeline's rows, however few tokens there are.
    reading = batches * case.parts * passes * (stays.weights + stays.adapter) / device.bandwidth
    rate = device.flops_of(config.model.dtype) * config.plan.efficiency
    computing = batches * _on_busiest_device(case, passes) / rate
    busy = max(computing, reading)
    scored = batches * _scored(case)
    seconds = {
        "products" if computing >= reading else "reading weights": busy,
        "bubble": busy * waits / (1 - waits),
        **({"frozen policies": scored / layout.devices / rate} if scored else {}),
        **{f"exchange over {name}": size / speed[links[name]] for name, size in sent.items() if size},
        # Weights, gradients and two moments are read, three of them written.
        "optimizer": 7 * (stays.optimizer / 2) / device.bandwidth,
    }
    return Costs(
        micro_batches=batches,
        tokens=tokens,
        flops=_total(case, passes) * batches + scored,
        useful_flops=_useful(case) * batches,
        sent=sent,
        links=links,
        bubble=waits,
        seconds=seconds,
    )


def _passes(case: Case) -> float:
    """Products with weights by forward, backward and recomputation, in forward passes: the gradient of the input is
    one, that of the weight, where it is trained, another."""
    return 1.0 + (1.0 if case.config.lora.rank else 2.0) + (1.0 if case.remat == "layer" else 0.0)


def _longest(case: Case) -> int:
    """Tokens of the longest sequence that a row holds."""
    shape = case.config.learner.row_shape
    return case.tokens if shape is None else shape.prefix + shape.own_tokens(case.tokens)


def _rows(case: Case, tokens: float) -> float:
    """Of an update of so many tokens: full ones, or of each group as many as its samples need."""
    rollout, shape = case.config.rollout, case.config.learner.row_shape
    if shape is None:
        return tokens / case.tokens
    return rollout.tasks_per_update * math.ceil(rollout.group_size / shape.samples)


def layer_flops(arch: Architecture, layer: Layer, seen: float) -> tuple[float, float]:
    """(products with weights, attention) of a token with scores of `seen` tokens, forward."""
    products = sum(
        2.0 * math.prod(spec.shape)
        for path, spec in flat_specs(arch, layer).items()
        if path[-1] == "kernel" and path[:2] != ("mlp", "experts")
    )
    return products + _expert_flops(arch, layer), attention_flops(layer.mixer, seen)


def _expert_flops(arch: Architecture, layer: Layer) -> float:
    """Of the experts that a token is sent to."""
    if not isinstance(layer.mlp, Experts):
        return 0.0
    every = sum(
        math.prod(spec.shape) for path, spec in flat_specs(arch, layer).items() if path[:2] == ("mlp", "experts")
    )
    return 2.0 * every * layer.mlp.top_k / layer.mlp.count


def once_more(case: Case, layer: Layer) -> float:
    """FLOPs of a token of what is computed again on a mesh whatever `remat` says, by backward passes of their own: a
    delta rule, and experts, whose forward pass a recomputed layer has no use for (`rlx.models.sharded_recurrence`,
    `rlx.parallel.expert`)."""
    if case.layout.devices == 1:
        return 0.0
    experts = _expert_flops(case.arch, layer) if case.remat != "layer" else 0.0
    rule = isinstance(layer.mixer, DeltaNet | KimiDelta)
    return experts + (attention_flops(layer.mixer, case.seen) * _maps(case, layer) if rule else 0.0)


def _maps(case: Case, layer: Layer) -> int:
    """How often attention is computed: over cp delta rules find the map of their part of a row beside its outputs."""
    return 2 if case.layout.cp > 1 and isinstance(layer.mixer, DeltaNet | KimiDelta) else 1


def attention_flops(mixer: Mixer, seen: float) -> float:
    """Of one token, with scores of `seen` tokens; of a delta rule over its chunk of 64 tokens, and its state twice."""
    match mixer:
        case Attention():
            return 4.0 * mixer.heads * mixer.head_dim * seen
        case LatentAttention():
            return 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) * seen
        case DeltaNet():
            heads, key, value = mixer.value_heads, mixer.key_dim, mixer.value_dim
        case KimiDelta():
            heads, key, value = mixer.heads, mixer.head_dim, mixer.head_dim
    return 2.0 * heads * (2 * 64 * (key + value) + 3 * key * value)


def flops_of_token(case: Case) -> Flops:
    return _flops_of_token(case.arch, case.seen)


@functools.lru_cache(maxsize=64)
def _flops_of_token(arch: Architecture, seen: float) -> Flops:
    each = [layer_flops(arch, layer, seen) for layer in arch.layers]
    head = 2.0 * arch.hidden_size * arch.vocab_size
    return Flops(sum(a for a, _ in each), sum(b for _, b in each), head)


def _useful(case: Case) -> float:
    """Of a micro-batch on all devices, nothing twice. A backward pass is two forward ones, and one where a product's
    weight is not trained; attention has two factors in each product and no weights."""
    one, passes = flops_of_token(case), 2.0 if case.config.lora.rank else 3.0
    tokens, targets = case.rows * case.tokens, case.rows * case.targets
    return tokens * (one.products * passes + one.attention * 3.0) + targets * one.head * passes


def _scored(case: Case) -> float:
    """Forward passes of frozen policies over a micro-batch, on all devices. A KL that is subtracted from rewards asks
    the trained policy too."""
    archs = [policy.arch for policy in scoring.policies(case)]
    archs += [case.arch] if case.config.objective.penalises_rewards else []
    each = [_flops_of_token(arch, case.seen) for arch in archs]
    tokens, targets = case.rows * case.tokens, case.rows * case.targets
    return sum(tokens * (one.products + one.attention) + targets * one.head for one in each)


def _total(case: Case, passes: float) -> float:
    """Of a micro-batch on all devices. Attention's backward pass is two and a half of its forward one, the head's
    recomputes its logits."""
    one, tokens, targets = flops_of_token(case), case.rows * case.tokens, case.rows * case.targets
    recomputed = passes > (2.0 if case.config.lora.rank else 3.0)
    attention = 3.5 + (1.0 if recomputed else 0.0)
    head = 3.0 if case.config.lora.rank else 4.0
    again = sum(once_more(case, layer) for layer in case.arch.layers)
    return tokens * (one.products * passes + one.attention * attention + again) + targets * one.head * head


def _on_busiest_device(case: Case, passes: float) -> float:
    """Of a micro-batch: layers outside of the pipeline are computed by every stage."""
    layout, total = case.layout, 0.0
    tokens = case.rows * case.tokens / (layout.dp * layout.cp * layout.tp)
    for group in groups(case):
        for slot in group:
            products, attention = layer_flops(case.arch, slot.layer, case.seen)
            each = (
                products * passes + attention * _maps(case, slot.layer) * (passes + 1.5) + once_more(case, slot.layer)
            )
            total += repeats_here(case, group) * each * tokens
    head = flops_of_token(case).head * (3.0 if case.config.lora.rank else 4.0)
    return total + head * case.rows * case.targets / layout.devices


def _link(case: Case, name: str) -> str:
    """Neighbours on the last axes share a machine as far as it reaches."""
    axes = case.layout.expert_axes if name == "ep" else (name,)
    inner = {axis: math.prod(case.layout.size(other) for other in AXES[AXES.index(axis) + 1 :]) for axis in AXES}
    spans = max(inner[axis] * case.layout.size(axis) for axis in AXES if axis in axes)
    return "nvlink" if spans <= case.config.cluster.gpus_per_node else "network"


def _sent(case: Case, passes: float) -> dict[str, float]:
    """Bytes that a device sends in a micro-batch, by axis."""
    layout = case.layout
    of = lambda n: (n - 1) / n  # noqa: E731
    rows = case.rows / layout.dp * case.tokens / layout.cp  # tokens of a micro-batch on a device
    d_stream = rows * case.arch.hidden_size * case.itemsize
    layers = [(group, slot) for group in groups(case) for slot in group]
    count = sum(repeats_here(case, group) for group, _ in layers)
    own, forwards = numbers(case).trained * WIDE, 2.0 if case.remat == "layer" else 1.0
    sent: dict[str, float] = {}
    # After each of a layer's two row-parallel products, and of the gradient before each column-parallel one; a sum that
    # is scattered, and gathered before the next product, sends as much.
    sent["tp"] = 2 * of(layout.tp) * 2 * count * (forwards + 1) * d_stream
    sent["cp"] = sum(
        repeats_here(case, group) * _shown(case, slot.layer.mixer) * _rounds(case, slot.layer.mixer, forwards)
        for group, slot in layers
    )
    if layout.pp > 1:
        stream = rows * stream_bytes(case) / case.stream_parts
        handed, last = stream / case.parts, 2 * of(layout.pp) * stream
        sent["pp"] = sum(
            2 * ticks(layout, case.parts, group_rounds(case, group)) * handed + last + dealt(case, group).sent
            for group in groups(case)
            if piped(case, group)
        )
    if layout.dp > 1:
        weights = _cut_over_dp(case)
        sent["dp"] = (layout.dp - 1) * weights * forwards + (layout.dp - 1) * weights + 2 * of(layout.dp) * own
    if layout.ep > 1:
        exchanged = sum(repeats_here(case, group) * _block(case, slot.layer) for group, slot in layers)
        sent["ep"] = of(layout.ep) * exchanged * 6  # there and back: forward, that again, backward; `once_more`
    return {name: size for name, size in sent.items() if size}


def _rounds(case: Case, mixer: Mixer, forwards: float) -> float:
    """How often a device sends what `_shown` counts: to each of the others in each forward pass and twice in the
    backward pass, where attention's gradients are float32 and go once all the way round a ring."""
    others = case.layout.cp - 1
    if isinstance(mixer, Attention | LatentAttention):
        return others * (forwards + 1) + (case.layout.cp if case.ring else others) * WIDE / case.itemsize
    return others * (forwards + 2)


def _shown(case: Case, mixer: Mixer) -> float:
    """Bytes that a device gives to the others of its cp group in a micro-batch: keys and values of its tokens, or of
    each of its rows the map from the state before its part to the one after it and the last inputs of a convolution."""
    rows, tp = case.rows / case.layout.dp, case.layout.tp
    tokens = rows * case.tokens_here
    match mixer:
        case Attention():
            return tokens * 2 * max(mixer.kv_heads / tp, 1) * mixer.head_dim * case.itemsize
        case LatentAttention():
            return tokens * mixer.heads / tp * (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) * case.itemsize
        case DeltaNet():
            heads, key, value = mixer.value_heads, mixer.key_dim, mixer.value_dim
            channels = 2 * mixer.key_heads * key + heads * value
        case KimiDelta():
            heads, key, value = mixer.heads, mixer.head_dim, mixer.head_dim
            channels = 3 * heads * key
    held = heads * key * (key + value) * WIDE
    return rows * (held + channels * (mixer.conv_width - 1) * case.itemsize) / tp


def _block(case: Case, layer: Layer) -> float:
    """Bytes that a device gives to one exchange of a micro-batch: blocks of a fixed size, `rlx.parallel.expert`."""
    feed, layout = layer.mlp, case.layout
    if not isinstance(feed, Experts):
        return 0.0
    tokens = case.rows * case.tokens / (layout.dp * layout.cp * layout.tp)
    rows = layout.ep * tokens * min(feed.top_k, feed.count // layout.ep)
    return rows * (feed.latent or case.arch.hidden_size) * case.itemsize


def _cut_over_dp(case: Case) -> float:
    """Bytes of weights that a device holds a share of, which the others of its dp group need: what ZeRO gathers."""
    return numbers(case).base * case.itemsize
