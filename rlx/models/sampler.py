"""Continuous batching on the device: a fixed number of slots, each with its part of the layers' caches.

Three compiled functions: `prefill` (prompts of one length bucket -> what their layers cache), `admit` (copies that into
the slots of all samples of a prompt) and `decode` (several tokens for every active slot). Results stay on the device
until the host collects a finished slot. What a layer caches is its mixer's business (`models.kinds`): keys and values,
latents, a state. Layers are a tuple of per-layer trees here: a loop over stacked weights would copy each layer's
weights at every token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from rlx.models import residual
from rlx.models.blockwise import default_block
from rlx.models.cache import LayerCache
from rlx.models.description import Architecture, Experts, Params
from rlx.models.kinds import kind
from rlx.models.rows import packed_rows, token_rows
from rlx.models.sampling import Draw, draw, no_draw
from rlx.models.transformer import block, layer_trees, logits
from rlx.models.weights import Weights, normalise

_STOPS = 8  # ids that there is room for, and multiples of it


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    ends: tuple[int, ...]  # where the stretches of the cache end, ascending; the last is the context, tokens
    head_size: int
    steps: int  # the most tokens decoded in one dispatch
    routes: bool = False  # record which experts each token is sent to

    @property
    def context(self) -> int:
        """Tokens of prompt and response."""
        return self.ends[-1]


@struct.dataclass
class Slots:
    """Everything a slot holds. `token` is the last one written (at first: the prompt's last), not yet in the cache."""

    caches: tuple[LayerCache, ...]  # a layer each
    token: Array  # int32 [slots]
    position: Array  # int32 [slots], of `token`
    active: Array  # bool [slots]
    count: Array  # int32 [slots], tokens written
    limit: Array  # int32 [slots], tokens the request may write
    seed: Array  # uint32 [slots]
    temperature: Array  # float32 [slots]


@struct.dataclass
class Dispatch:
    """What one `decode` wrote. Of slot s the first `written[s]` steps hold tokens."""

    written: Array  # int32 [slots]
    active: Array  # bool [slots], afterwards
    stopped: Array  # bool [slots]: the last token is a stop token
    drawn: Draw  # leaves [steps, slots, ...]
    routes: Array | None  # int16 [steps, slots, layers of experts, k]: of the token that was fed, where recorded


@struct.dataclass
class Prefilled:
    """Prompts of one bucket with what their layers cache of all their tokens but the last, which `decode` feeds."""

    tokens: Array  # int32 [rows, bucket]
    lengths: Array  # int32 [rows]
    caches: tuple[LayerCache, ...]  # a layer each; growing ones reach to the bucket's end


@struct.dataclass
class Admission:
    """What each slot begins with."""

    prompt: Array  # int32 [slots], row of the prefilled prompts; -1: the slot goes on with what it has
    count: Array  # int32 [slots], tokens of that row which the request itself wrote
    limit: Array  # int32 [slots]
    seed: Array  # uint32 [slots]
    temperature: Array  # float32 [slots]


def routes_shape(arch: Architecture) -> tuple[int, int]:
    """(layers of experts, choices of each) of a token. Raises ValueError where the layers choose different numbers."""
    chosen = {layer.mlp.top_k for layer in arch.layers if isinstance(layer.mlp, Experts)}
    if len(chosen) != 1:
        raise ValueError(f"routes are recorded of models whose layers choose the same number of experts, not {chosen}")
    return len(arch.expert_layers), chosen.pop()


def unstack_layers(arch: Architecture, params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer trees, in the model's order."""
    return {**params, "layers": layer_trees(arch, params["layers"])}


def init_slots(arch: Architecture, ends: tuple[int, ...], slots: int, dtype: jnp.dtype) -> Slots:
    """Empty ones; `ends` as in `SamplerConfig`."""
    row = lambda dtype: jnp.zeros(slots, dtype)  # noqa: E731
    mixers = [layer.mixer for layer in arch.layers]
    return Slots(
        caches=tuple(kind(mixer).empty(mixer, slots, ends, dtype) for mixer in mixers),
        token=row(jnp.int32),
        position=row(jnp.int32),
        active=row(bool),
        count=row(jnp.int32),
        limit=row(jnp.int32),
        seed=row(jnp.uint32),
        temperature=row(jnp.float32),
    )


@partial(jax.jit, static_argnums=0)
def prefill(
    arch: Architecture, params: Params, tokens: Int[Array, "rows bucket"], lengths: Int[Array, " rows"]
) -> Prefilled:
    """What layers cache of prompts. The last token of each is left out, and with it all that follows: `decode` feeds it
    again, and a state must not take it in twice."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    inside = positions < lengths[:, None] - 1
    at_once = default_block(length, accelerator=jax.default_backend() != "cpu")  # an engine has one device, jax's first
    packed = packed_rows(arch, positions, inside.astype(jnp.int32), attention_block=at_once)
    stream, caches = residual.start(arch, params["embed"][tokens]), []
    for number, (layer, weights) in enumerate(zip(arch.layers, params["layers"], strict=True)):
        functions = kind(layer.mixer)
        mix = lambda w, x, f=functions, m=layer.mixer: f.forward(m, arch, w, x, packed)  # noqa: E731
        stream, made, _ = block(arch, layer, Weights(weights, {}, 1.0), stream, number, mix, inside)
        caches.append(functions.keep(layer.mixer, made))
    return Prefilled(tokens, lengths, tuple(caches))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def admit(arch: Architecture, slots: Slots, prompts: Prefilled, admission: Admission) -> Slots:
    """Start requests, or go on with them under new weights. A row's last token is fed again by the next decode step,
    which samples from it."""
    source = admission.prompt
    new = source >= 0
    last = prompts.lengths[source] - 1

    filled = (
        held.filled(made, kind(layer.mixer).axes, source)
        for layer, held, made in zip(arch.layers, slots.caches, prompts.caches, strict=True)
    )
    return dataclasses.replace(
        slots,
        caches=tuple(filled),
        token=jnp.where(new, prompts.tokens[source, last], slots.token),
        position=jnp.where(new, last, slots.position),
        active=slots.active | new,
        count=jnp.where(new, admission.count, slots.count),
        limit=jnp.where(new, admission.limit, slots.limit),
        seed=jnp.where(new, admission.seed, slots.seed),
        temperature=jnp.where(new, admission.temperature, slots.temperature),
    )


@partial(jax.jit, donate_argnums=0)
def release(slots: Slots, given_up: Bool[Array, " slots"]) -> Slots:
    """Nothing more is written in these slots."""
    return dataclasses.replace(slots, active=slots.active & ~given_up)


@jax.jit
def resize(slots: Slots, source: Int[Array, " new"]) -> Slots:
    """As many slots as `source` has entries, each with what slot `source` had; nothing is active where it is -1."""
    moved = jax.tree.map(lambda x: x[source], slots)
    return dataclasses.replace(moved, active=moved.active & (source >= 0))


def _step(
    arch: Architecture, config: SamplerConfig, params: Params, slots: Slots, stop_ids: Array
) -> tuple[Slots, tuple[Draw, Array | None]]:
    """Write one token in every active slot; what is drawn in the others does not matter. Returns also the experts that
    the tokens fed were sent to, where they are recorded."""
    stream, caches, choices = residual.start(arch, params["embed"][slots.token][:, None]), [], []
    token, valid = token_rows(arch, slots.position), slots.active[:, None]
    for number, (layer, weights, held) in enumerate(zip(arch.layers, params["layers"], slots.caches, strict=True)):
        mixer, functions = layer.mixer, kind(layer.mixer)
        mix = lambda w, x, f=functions, m=mixer, c=held: f.step(m, arch, w, x, c, token)  # noqa: E731
        stream, new, routing = block(arch, layer, Weights(weights, {}, 1.0), stream, number, mix, valid)
        caches.append(new)
        choices += [] if routing is None else [routing.choices[:, 0].astype(jnp.int16)]
    routes = jnp.stack(choices, axis=1) if config.routes and choices else None
    hidden = residual.finish(arch, params, stream)[:, 0]
    hidden = normalise(arch.norm, hidden, params["final_norm"], arch.rms_norm_eps)
    drawn = draw(logits(params, hidden), slots.temperature, slots.seed, slots.count, config.head_size)

    count, position = slots.count + slots.active, slots.position + slots.active
    over = _is_stop(drawn.tokens, stop_ids) | (count >= slots.limit) | (position >= config.context)
    return dataclasses.replace(
        slots,
        caches=tuple(caches),
        token=jnp.where(slots.active, drawn.tokens, slots.token),
        position=position,
        active=slots.active & ~over,
        count=count,
    ), (drawn, routes)


def _is_stop(tokens: Int[Array, " slots"], stop_ids: Int[Array, " stops"]) -> Bool[Array, " slots"]:
    return (tokens[:, None] == stop_ids).any(axis=1)


def stop_array(ids: Sequence[int]) -> Int[np.ndarray, " stops"]:
    """What `decode` takes of them: their number hardly ever makes for another program."""
    padded = np.full(max(-(-len(ids) // _STOPS), 1) * _STOPS, -1, np.int32)
    padded[: len(ids)] = ids
    return padded


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
    arch: Architecture,
    config: SamplerConfig,
    stretches: int,
    params: Params,
    slots: Slots,
    until_free: Bool[Array, ""],
    stop_ids: Int[Array, " stops"],
) -> tuple[Slots, Dispatch]:
    """Up to `config.steps` tokens in every active slot, over the first `stretches` of the cache.

    stop_ids: tokens that end a response (`stop_array`); negative ones are none.

    Returns early when no slot is active, when an active one has come to the end of these stretches, and, with
    `until_free`, when one has come to its end and could serve somebody else.
    """
    end = config.ends[stretches - 1]

    def more(carry: tuple[Array, Slots, Any]) -> Array:
        step, now, _ = carry
        inside = jnp.where(now.active, now.position, 0).max() < end
        busy = now.active.sum()
        return (step < config.steps) & (busy > 0) & inside & ~(until_free & (busy < slots.active.sum()))

    def body(carry: tuple[Array, Slots, Any]) -> tuple[Array, Slots, Any]:
        step, now, written = carry
        now, drawn = _step(arch, config, params, now, stop_ids)
        return step + 1, now, jax.tree.map(lambda all_, new: all_.at[step].set(new), written, drawn)

    start = dataclasses.replace(slots, caches=tuple(held.first(stretches) for held in slots.caches))
    nothing = no_draw(slots.token.shape[0], config.head_size), _no_routes(arch, config, slots.token.shape[0])
    written = jax.tree.map(lambda x: jnp.broadcast_to(x, (config.steps, *x.shape)), nothing)
    _, done, (drawn, routes) = jax.lax.while_loop(more, body, (jnp.int32(0), start, written))
    caches = tuple(new.rest_of(old) for new, old in zip(done.caches, slots.caches, strict=True))
    done = dataclasses.replace(done, caches=caches)
    return done, Dispatch(
        written=done.count - slots.count,
        active=done.active,
        stopped=_is_stop(done.token, stop_ids),
        drawn=drawn,
        routes=routes,
    )


def _no_routes(arch: Architecture, config: SamplerConfig, slots: int) -> Array | None:
    """Zeros, in the shape of a step's routes."""
    if not config.routes or not arch.expert_layers:
        return None
    return jnp.zeros((slots, *routes_shape(arch)), jnp.int16)
