"""Continuous batching on the device: a fixed number of slots, each with its stretches of key/value cache.

Three compiled functions: `prefill` (prompts of one length bucket -> keys and values), `admit` (copies a prompt's keys
and values into the slots of all its samples) and `decode` (several tokens for every active slot). Results stay on the
device until the host collects a finished slot. Layers are a tuple of per-layer trees here: a loop over stacked weights
would copy each layer's weights at every token.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from rlx.models import cache
from rlx.models.cache import Stretches
from rlx.models.layers import attention, rms_norm
from rlx.models.sampling import Draw, draw, no_draw
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import block, logits


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    ends: tuple[int, ...]  # where the stretches of the cache end, ascending; the last is the context, tokens
    head_size: int
    steps: int  # the most tokens decoded in one dispatch
    stop_ids: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens of prompt and response."""
        return self.ends[-1]


@struct.dataclass
class Slots:
    """Everything a slot holds. `token` is the last one written (at first: the prompt's last), not yet in the cache."""

    keys: tuple[Stretches, ...]  # a layer each
    values: tuple[Stretches, ...]
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


@struct.dataclass
class Prefilled:
    """Prompts of one bucket with their keys and values."""

    tokens: Array  # int32 [rows, bucket]
    lengths: Array  # int32 [rows]
    keys: tuple[Array, ...]  # a layer: [rows, kv_heads, d, bucket]
    values: tuple[Array, ...]  # a layer: [rows, kv_heads, bucket, d]


@struct.dataclass
class Admission:
    """What each slot begins with."""

    prompt: Array  # int32 [slots], row of the prefilled prompts; -1: the slot goes on with what it has
    count: Array  # int32 [slots], tokens of that row which the request itself wrote
    limit: Array  # int32 [slots]
    seed: Array  # uint32 [slots]
    temperature: Array  # float32 [slots]


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer trees."""
    count = params["layers"]["input_layernorm"].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count))}


def init_slots(arch: Architecture, config: SamplerConfig, slots: int, dtype: jnp.dtype) -> Slots:
    shape = (slots, config.ends, arch.num_kv_heads, arch.head_dim, dtype)
    row = lambda dtype: jnp.zeros(slots, dtype)  # noqa: E731
    return Slots(
        keys=tuple(cache.empty_keys(*shape) for _ in range(arch.num_layers)),
        values=tuple(cache.empty_values(*shape) for _ in range(arch.num_layers)),
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
    """Keys and values of prompts. What follows a prompt in its row is not seen by it, so padding needs no mask;
    `decode` overwrites it."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    keys, values = [], []

    def attend(query: Array, key: Array, value: Array) -> Array:
        keys.append(cache.as_keys(key))
        values.append(cache.as_values(value))
        return attention(query, key, value, causal)

    hidden = params["embed"][tokens]
    for layer in params["layers"]:
        hidden = block(arch, layer, hidden, positions, attend, adapter={}, adapter_scale=1.0)
    return Prefilled(tokens, lengths, tuple(keys), tuple(values))


@partial(jax.jit, donate_argnums=0)
def admit(slots: Slots, prompts: Prefilled, admission: Admission) -> Slots:
    """Start requests, or go on with them under new weights. A row's last token is fed again by the next decode step,
    which samples from it."""
    source = admission.prompt
    new = source >= 0
    last = prompts.lengths[source] - 1

    def fill(old: tuple[Stretches, ...], rows: tuple[Array, ...], axis: int) -> tuple[Stretches, ...]:
        return tuple(cache.filled(o, r, axis, source) for o, r in zip(old, rows, strict=True))

    return dataclasses.replace(
        slots,
        keys=fill(slots.keys, prompts.keys, 3),
        values=fill(slots.values, prompts.values, 2),
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


def _step(arch: Architecture, config: SamplerConfig, params: Params, slots: Slots) -> tuple[Slots, Draw]:
    """Write one token in every active slot; what is drawn in the others does not matter."""
    keys, values = list(slots.keys), list(slots.values)
    hidden = params["embed"][slots.token][:, None]
    for i, layer in enumerate(params["layers"]):

        def attend(query: Array, key: Array, value: Array, i: int = i) -> Array:
            mixed, keys[i], values[i] = cache.attend(
                query[:, 0], key[:, 0], value[:, 0], keys[i], values[i], slots.position
            )
            return mixed[:, None]

        hidden = block(arch, layer, hidden, slots.position[:, None], attend, adapter={}, adapter_scale=1.0)
    hidden = rms_norm(hidden[:, 0], params["final_norm"], arch.rms_norm_eps)
    drawn = draw(logits(params, hidden), slots.temperature, slots.seed, slots.count, config.head_size)

    count, position = slots.count + slots.active, slots.position + slots.active
    over = _is_stop(config, drawn.tokens) | (count >= slots.limit) | (position >= config.context)
    return dataclasses.replace(
        slots,
        keys=tuple(keys),
        values=tuple(values),
        token=jnp.where(slots.active, drawn.tokens, slots.token),
        position=position,
        active=slots.active & ~over,
        count=count,
    ), drawn


def _is_stop(config: SamplerConfig, tokens: Int[Array, " slots"]) -> Bool[Array, " slots"]:
    return jnp.isin(tokens, jnp.array(config.stop_ids, jnp.int32))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
    arch: Architecture, config: SamplerConfig, stretches: int, params: Params, slots: Slots, until_free: Bool[Array, ""]
) -> tuple[Slots, Dispatch]:
    """Up to `config.steps` tokens in every active slot, over the first `stretches` of the cache.

    Returns early when no slot is active, when an active one has come to the end of these stretches, and, with
    `until_free`, when one has come to its end and could serve somebody else.
    """
    end = config.ends[stretches - 1]
    used = lambda layers: tuple(s[:stretches] for s in layers)  # noqa: E731
    rest = lambda new, old: tuple(n + o[stretches:] for n, o in zip(new, old, strict=True))  # noqa: E731

    def more(carry: tuple[Array, Slots, Draw]) -> Array:
        step, now, _ = carry
        inside = jnp.where(now.active, now.position, 0).max() < end
        busy = now.active.sum()
        return (step < config.steps) & (busy > 0) & inside & ~(until_free & (busy < slots.active.sum()))

    def body(carry: tuple[Array, Slots, Draw]) -> tuple[Array, Slots, Draw]:
        step, now, written = carry
        now, drawn = _step(arch, config, params, now)
        return step + 1, now, jax.tree.map(lambda all_, new: all_.at[step].set(new), written, drawn)

    start = dataclasses.replace(slots, keys=used(slots.keys), values=used(slots.values))
    nothing = no_draw(slots.token.shape[0], config.head_size)
    written = jax.tree.map(lambda x: jnp.broadcast_to(x, (config.steps, *x.shape)), nothing)
    _, done, drawn = jax.lax.while_loop(more, body, (jnp.int32(0), start, written))
    done = dataclasses.replace(done, keys=rest(done.keys, slots.keys), values=rest(done.values, slots.values))
    return done, Dispatch(
        written=done.count - slots.count,
        active=done.active,
        stopped=_is_stop(config, done.token),
        drawn=drawn,
    )
