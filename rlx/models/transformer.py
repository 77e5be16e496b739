"""The forward pass of a decoder over packed rows: token ids in, hidden states out.

A model is a description (`models.description`): groups of layers, each a pattern that is repeated. The pass scans over
the repeats, the pattern unrolled inside. It returns hidden states, never logits: the head is joined to the objective in
`learner/step.py`, where logits [T, V] never exist whole. `block` is also what the sampler runs over its cache, so that
there is one forward pass to get right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from rlx.models import mlp, moe, residual
from rlx.models.description import (
    Architecture,
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Params,
    Slot,
    group_slots,
    slots,
)
from rlx.models.kinds import kind, recurrent
from rlx.models.layers import KEPT
from rlx.models.moe import Routing
from rlx.models.residual import Stream
from rlx.models.rows import Rows, packed_rows
from rlx.models.spec import layer_specs
from rlx.models.weights import Weights, normalise
from rlx.parallel import blocks, pipeline
from rlx.parallel.layout import rounds_of
from rlx.parallel.mesh import Placement
from rlx.parallel.sequence import embedded, gathered, scattered
from rlx.types import RowShape

# x [rows, t, d] of one layer's mixer -> (y, what the caller wants kept); it decides what is attended to.
Mix = Callable[[Weights, Array], tuple[Array, Any]]

# What the backward pass recomputes of every block: nothing, all but matrix products and attention, everything.
Remat = Literal["none", "products", "layer"]


def block(
    arch: Architecture,
    layer: Layer,
    weights: Weights,
    stream: Stream,
    number: Int[Array, ""] | int,
    mix: Mix,
    valid: Array,
    replayed: Array | None = None,
    placement: Placement | None = None,
) -> tuple[Stream, Any, Routing | None]:
    """One layer: its mixer, then its MLP. `weights` have no leading layer axis; `valid` [rows, t] is false on padding.

    Returns (stream, what `mix` made, what the router did).
    """

    def normed(name: str, x: Array) -> Array:
        return normalise(arch.norm, x, weights.params[name], arch.rms_norm_eps)

    def sub_layer(name: str, run: Callable[[Weights, Array], tuple[Array, Any]]) -> tuple[Stream, Any]:
        x, after = residual.read(arch, weights, stream, number, name)
        y, made = run(weights.sub(name), normed(f"{name}_norm", x) if layer.norms == "pre" else x)
        return residual.add(arch, after, y if layer.norms == "pre" else normed(f"{name}_norm", y)), made

    def feed(inside: Weights, x: Array) -> tuple[Array, Routing | None]:
        if isinstance(layer.mlp, Experts):  # they take a device's own tokens
            return moe.forward(layer.mlp, arch, inside, x, valid, replayed, placement)
        return scattered(placement, mlp.forward(layer.mlp, inside, gathered(placement, x))), None

    def mixed(inside: Weights, x: Array) -> tuple[Array, Any]:
        y, made = mix(inside, gathered(placement, x))
        return scattered(placement, y), made

    stream, made = sub_layer("mixer", mixed)
    stream, routing = sub_layer("mlp", feed)
    return stream, made, routing


def forward(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "rows t"],
    positions: Int[Array, "rows t"],
    segment_ids: Int[Array, "rows t"],
    prefix_ids: Int[Array, "rows t"] | None = None,
    *,
    adapter: Params | None = None,
    adapter_scale: float = 1.0,
    remat: Remat = "none",
    unrolled: bool = False,
    placement: Placement | None = None,
    attention_block: int = 0,
    row_shape: RowShape | None = None,
) -> Float[Array, "rows t d"]:
    """Hidden states after the final norm.

    Args:
      tokens: ids in [0, vocab_size); what padding (segment 0) holds does not matter to other segments.
      positions: of each token in its own sequence, its prefix included, from 0.
      segment_ids: which packed sequence a token belongs to, 0 = padding. Recurrent layers start anew where it changes.
      prefix_ids: the segment that holds the beginning of this one's sequence, 0 = none: `packed_causal_mask`.
      adapter: LoRA tree (see `models.lora`), added to the linear layers it names.
      remat: what the backward pass recomputes.
      unrolled: one layer after the other in the program, not a loop over them. It is faster where what a layer keeps
        for the backward pass is much next to its arithmetic, as a loop copies that into arrays over layers and back;
        it compiles for as many times longer as there are layers.
      placement: the devices that share the work, None = one. A pipeline runs groups with at least a repeat a stage;
        others, a dense first layer say, are computed by every stage.
      attention_block: tokens whose attention scores exist at once, 0 = all of a row's.
      row_shape: where the parts of a row lie, None = anywhere. Scores are then those of its parts.
    """
    return forward_routed(
        arch,
        params,
        tokens,
        positions,
        segment_ids,
        prefix_ids,
        adapter=adapter,
        adapter_scale=adapter_scale,
        remat=remat,
        unrolled=unrolled,
        placement=placement,
        attention_block=attention_block,
        row_shape=row_shape,
    )[0]


def forward_routed(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "rows t"],
    positions: Int[Array, "rows t"],
    segment_ids: Int[Array, "rows t"],
    prefix_ids: Int[Array, "rows t"] | None = None,
    *,
    routes: Int[Array, "rows t layers k"] | None = None,
    adapter: Params | None = None,
    adapter_scale: float = 1.0,
    remat: Remat = "none",
    unrolled: bool = False,
    placement: Placement | None = None,
    attention_block: int = 0,
    row_shape: RowShape | None = None,
) -> tuple[Float[Array, "rows t d"], Routing | None]:
    """`forward`, and what the routers did, None where there are none.

    routes: expert choices to replay, of `arch.expert_layers`; negative where the router is to choose.
    """
    rows = packed_rows(arch, positions, segment_ids, prefix_ids, placement, attention_block, row_shape)
    stream = residual.start(arch, _embedded(params, tokens, placement))
    routings: list[tuple[tuple[int, ...], Routing]] = []
    for group in group_slots(arch):
        repeats = len(group[0].numbers)
        piped = placement is not None and 1 < placement.layout.pp <= repeats
        scanned = piped or (not unrolled and repeats > 1)
        circular = piped and placement is not None and rounds_of(repeats, placement.layout, placement.rounds) > 1
        step = _group_step(arch, group, adapter_scale, remat, placement, scanned=scanned, circular=circular)
        xs = tuple(_slot_inputs(arch, slot, params, adapter or {}, routes) for slot in group)
        if piped and placement is not None:
            stream, made = _piped(placement, step, rows, stream, xs, repeats)
        else:
            stream, made = _repeat(partial(step, rows), stream, xs, repeats, unrolled)
        routings += [(slot.numbers, routing) for slot, routing in zip(group, made, strict=True) if routing is not None]
    hidden = residual.finish(arch, params, stream)
    return normalise(arch.norm, hidden, params["final_norm"], arch.rms_norm_eps), _in_order(routings)


def _embedded(params: Params, tokens: Int[Array, "rows t"], placement: Placement | None) -> Float[Array, "rows t d"]:
    if placement is None:
        return params["embed"][tokens]
    # Whole over dp first: looked up in columns the result would be cut by columns, and move to its rows from there.
    table = placement.cut(params["embed"], PartitionSpec("tp"))
    return embedded(placement, table, tokens) if placement.over_tp else placement.rows(table[tokens])


def _slot_inputs(arch: Architecture, slot: Slot, params: Params, adapter: Params, routes: Array | None) -> tuple:
    """What the scan takes of a slot, a layer at a time: (parameters, adapter, numbers, choices to replay)."""
    replayed = None
    if routes is not None and isinstance(slot.layer.mlp, Experts):
        at = np.array([arch.expert_layers.index(number) for number in slot.numbers])
        replayed = jnp.moveaxis(routes[:, :, at], 2, 0)
    numbers = jnp.asarray(slot.numbers, jnp.int32)
    return params["layers"][slot.name], adapter.get(slot.name, {}), numbers, replayed


def _group_step(
    arch: Architecture,
    group: Sequence[Slot],
    scale: float,
    remat: Remat,
    placement: Placement | None,
    *,
    scanned: bool,
    circular: bool,
) -> Callable:
    """(rows, stream, inputs of the pattern's layers) -> (stream, their routings)."""

    def one(layer: Layer) -> Callable:
        def run(rows: Rows, stream: Stream, xs: tuple) -> tuple[Stream, Routing | None]:
            params, adapter, number, replayed = blocks.looked_up(xs)
            functions = kind(layer.mixer)
            mix = lambda inside, x: functions.forward(layer.mixer, arch, inside, x, rows)  # noqa: E731
            weights = Weights(params, adapter, scale, flat=placement is None)
            valid = rows.segment_ids > 0
            stream, _, routing = block(arch, layer, weights, stream, number, mix, valid, replayed, placement)
            return stream if placement is None else residual.placed(placement, stream), routing

        # Outside a loop the compiler would merge what is recomputed with what was computed.
        return recomputed(run, remat, prevent_cse=not scanned, circular=circular)

    layers = [one(slot.layer) for slot in group]

    def step(rows: Rows, stream: Stream, xs: tuple) -> tuple[Stream, tuple]:
        routings = []
        for run, inputs in zip(layers, xs, strict=True):
            stream, routing = run(rows, stream, inputs)
            routings.append(routing)
        return stream, tuple(routings)

    return step


def _piped(
    placement: Placement, step: Callable, rows: Rows, stream: Stream, xs: PyTree[Array], repeats: int
) -> tuple[Stream, Any]:
    """`_repeat` by the stages of a pipeline, the rows cut into micro-batches."""
    parts = placement.micro_batches
    *weights, replayed = zip(*xs, strict=True)
    if any(choices is not None for choices in replayed):
        raise ValueError("replayed expert choices in a pipeline are not supported: set PP to 1 or record no routes")
    bare = tuple((*own, None) for own in zip(*weights, strict=True))
    cut = jax.tree.map(lambda x: pipeline.split(x, parts), rows)
    carry, made = pipeline.run(placement, step, cut, residual.split(stream, parts), bare, repeats)
    return residual.joined(carry), tuple(routing and moe.joined(routing) for routing in made)


def _repeat(step: Callable, stream: Stream, xs: PyTree[Array], repeats: int, unrolled: bool) -> tuple[Stream, Any]:
    """`step` over the leading axis of `xs`; what it makes is stacked."""
    if repeats > 1 and not unrolled:
        return jax.lax.scan(step, stream, xs)
    made = []
    for inputs in unstacked(xs, repeats):
        stream, new = step(stream, inputs)
        made.append(new)
    return stream, jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def unstacked(layers: PyTree[Array], count: int) -> list[PyTree[Array]]:
    """The trees of single layers. The gradient of the stack is put together once, where that of slices is a sum."""
    leaves, structure = jax.tree.flatten(layers)
    parts = [[x[0] for x in jax.lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(count)]


def recomputed(step: Callable, remat: Remat, *, prevent_cse: bool, circular: bool = False) -> Callable:
    """`step`, a block, with what its backward pass recomputes: in a circular pipeline at least which weights it has."""
    if remat == "none" and not circular:
        return step
    policies = {"none": blocks.all_but_weights, "products": jax.checkpoint_policies.save_only_these_names(KEPT)}
    return jax.checkpoint(step, policy=policies.get(remat), prevent_cse=prevent_cse)


def _in_order(routings: list[tuple[tuple[int, ...], Routing]]) -> Routing | None:
    """One `Routing` of all layers, in the model's order."""
    if not routings:
        return None
    numbers = np.concatenate([numbers for numbers, _ in routings])
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(routing for _, routing in routings))
    return jax.tree.map(lambda leaf: leaf[np.argsort(numbers)], joined) if len(routings) > 1 else joined


def kept_bytes(arch: Architecture, itemsize: int) -> int:
    """Bytes for each token that remat = "products" keeps between the passes, the adapter's few left out."""
    return sum(_kept_of_layer(arch, layer, itemsize) for layer in arch.layers)


def _kept_of_layer(arch: Architecture, layer: Layer, itemsize: int) -> int:
    """The layer's input, what its products make, what attention makes, and a float32 a head."""
    widths, heads = [arch.hidden_size], 0
    for path, spec in traverse_util.flatten_dict(layer_specs(arch, layer)).items():
        if path[-1] == "kernel" and path[-2] != "down_proj":
            widths.append(spec.shape[-1])
        if path[-2:-1] in (("o_proj",), ("out_proj",)):
            widths.append(spec.shape[0])
        if path[:2] == ("mlp", "experts") and isinstance(layer.mlp, Experts):
            widths.append(layer.mlp.top_k * spec.shape[-1])
    if isinstance(layer.mixer, Attention | LatentAttention):
        heads = layer.mixer.heads
    return sum(widths) * itemsize + heads * 4


def prefix_sharing_unsupported_reason(arch: Architecture) -> str | None:
    """Why segments of a row of this model cannot share a prefix, None if they can.

    Attention lets a token see the prefix wherever it lies in the row; a layer that carries a state from one token to
    the next would have to begin every segment with the state at the prefix's end.
    """
    kinds = sorted({type(layer.mixer).__name__ for layer in arch.layers if recurrent(layer.mixer)})
    if not kinds:
        return None
    return f"its layers of kind {' and '.join(kinds)} carry a state from token to token, which cannot be shared"


def hidden_states(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "rows t"],
    positions: Int[Array, "rows t"],
    segment_ids: Int[Array, "rows t"],
) -> list[Float[Array, "rows t d"]]:
    """The residual stream before the first layer and after each, the last one after the final norm; with snapshots of
    the stream, what has been added up since the last one, all along. For checks: layers are run one by one."""
    rows, stream = packed_rows(arch, positions, segment_ids), residual.start(arch, params["embed"][tokens])
    states = [residual.plain(stream)]
    for number, (layer, tree) in enumerate(zip(arch.layers, layer_trees(arch, params["layers"]), strict=True)):
        mix = lambda w, x, m=layer.mixer: kind(m).forward(m, arch, w, x, rows)  # noqa: E731
        stream, _, _ = block(arch, layer, Weights(tree, {}, 1.0), stream, number, mix, segment_ids > 0)
        states.append(residual.plain(stream))
    if arch.residual_block is not None:
        return states
    hidden = residual.finish(arch, params, stream)
    return [*states[:-1], normalise(arch.norm, hidden, params["final_norm"], arch.rms_norm_eps)]


def layer_trees(arch: Architecture, layers: Params) -> tuple[Params, ...]:
    """The trees of single layers in the model's order, from those of slots."""
    trees: dict[int, Params] = {}
    for slot in slots(arch):
        for i, number in enumerate(slot.numbers):
            trees[number] = _layer_at(layers[slot.name], np.int32(i))
    return tuple(trees[number] for number in range(arch.num_layers))


@jax.jit  # one program for the layers of a slot, however many they are
def _layer_at(stacked: Params, at: Int[Array, ""]) -> Params:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), stacked)


def head_matrix(params: Params) -> Float[Array, "vocab d"]:
    """The output head; the embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
    """Dense logits in float32: for checks and for a sampler's last position, not for training."""
    return jnp.einsum("...d,vd->...v", hidden, head_matrix(params), preferred_element_type=jnp.float32)
