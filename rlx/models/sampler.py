"""Continuous batching on the device: a fixed number of slots, each with its stretch of key/value cache.

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
from jaxtyping import Array, Int

from rlx.models.layers import attention, rms_norm
from rlx.models.sampling import draw
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import block, logits


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    slots: int
    context: int  # tokens of prompt and response
    max_new_tokens: int  # the most that any request may ask for
    head_size: int
    steps: int  # tokens decoded in one dispatch
    stop_ids: tuple[int, ...]


@struct.dataclass
class Slots:
    """Everything a slot holds. `token` is the last one written (at first: the prompt's last), not yet in the cache."""

    keys: tuple[Array, ...]  # a layer: [slots, context, kv_heads, head_dim]
    values: tuple[Array, ...]
    token: Array  # int32 [slots]
    position: Array  # int32 [slots], of `token`
    active: Array  # bool [slots]
    stopped: Array  # bool [slots]: the last token is a stop token
    count: Array  # int32 [slots], tokens written
    limit: Array  # int32 [slots], tokens the request may write
    seed: Array  # uint32 [slots]
    temperature: Array  # float32 [slots]
    tokens: Array  # int32 [slots, max_new_tokens]
    logprobs: Array  # float32 [slots, max_new_tokens]
    head_ids: Array  # int32 [slots, max_new_tokens, K]
    head_logprobs: Array  # float32 [slots, max_new_tokens, K]


@struct.dataclass
class Admission:
    """Which prompt goes to which slot. Padded to the number of slots: an entry with slot >= slots is dropped."""

    slot: Array  # int32 [slots]
    prompt: Array  # int32 [slots], row of the prefilled prompts
    count: Array  # int32 [slots], tokens of that row which the request itself wrote
    limit: Array  # int32 [slots]
    seed: Array  # uint32 [slots]
    temperature: Array  # float32 [slots]


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of per-layer trees."""
    count = params["layers"]["input_layernorm"].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count))}


def init_slots(arch: Architecture, config: SamplerConfig, dtype: jnp.dtype) -> Slots:
    shape = (config.slots, config.context, arch.num_kv_heads, arch.head_dim)
    written, head = (config.slots, config.max_new_tokens), (config.slots, config.max_new_tokens, config.head_size)
    cache = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(arch.num_layers))  # noqa: E731
    row = lambda dtype: jnp.zeros(config.slots, dtype)  # noqa: E731
    return Slots(
        keys=cache(),
        values=cache(),
        token=row(jnp.int32),
        position=row(jnp.int32),
        active=row(bool),
        stopped=row(bool),
        count=row(jnp.int32),
        limit=row(jnp.int32),
        seed=row(jnp.uint32),
        temperature=row(jnp.float32),
        tokens=jnp.zeros(written, jnp.int32),
        logprobs=jnp.zeros(written, jnp.float32),
        head_ids=jnp.zeros(head, jnp.int32),
        head_logprobs=jnp.zeros(head, jnp.float32),
    )


@partial(jax.jit, static_argnums=0)
def prefill(
    arch: Architecture, params: Params, tokens: Int[Array, "rows bucket"]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Keys and values [rows, bucket, kv_heads, head_dim] of each layer. What follows a prompt in its row is not seen
    by it, so padding needs no mask; `decode` overwrites it."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    keys, values = [], []

    def attend(query: Array, key: Array, value: Array) -> Array:
        keys.append(key)
        values.append(value)
        return attention(query, key, value, causal)

    hidden = params["embed"][tokens]
    for layer in params["layers"]:
        hidden = block(arch, layer, hidden, positions, attend, adapter={}, adapter_scale=1.0)
    return tuple(keys), tuple(values)


@partial(jax.jit, donate_argnums=0)
def admit(
    slots: Slots,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    tokens: Int[Array, "rows bucket"],
    lengths: Int[Array, " rows"],
    admission: Admission,
) -> Slots:
    """Start requests, or go on with them under new weights. A row's last token is fed again by the next decode step,
    which samples from it."""
    at, bucket = admission.slot, tokens.shape[1]

    def put(old: Array, new: Array) -> Array:
        return old.at[at].set(new, mode="drop")

    def fill(cache: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(c.at[at, :bucket].set(n[admission.prompt], mode="drop") for c, n in zip(cache, new, strict=True))

    last = lengths[admission.prompt] - 1
    zeros = jnp.zeros_like(last)
    return dataclasses.replace(
        slots,
        keys=fill(slots.keys, keys),
        values=fill(slots.values, values),
        token=put(slots.token, tokens[admission.prompt, last]),
        position=put(slots.position, last),
        active=put(slots.active, zeros == 0),
        stopped=put(slots.stopped, zeros != 0),
        count=put(slots.count, admission.count),
        limit=put(slots.limit, admission.limit),
        seed=put(slots.seed, admission.seed),
        temperature=put(slots.temperature, admission.temperature),
    )


def _step(arch: Architecture, config: SamplerConfig, params: Params, slots: Slots) -> Slots:
    """Write one token in every active slot."""
    row = jnp.arange(config.slots)
    visible = jnp.arange(config.context)[None, None, :] <= slots.position[:, None, None]
    keys, values = list(slots.keys), list(slots.values)
    hidden = params["embed"][slots.token][:, None]
    for i, layer in enumerate(params["layers"]):

        def attend(query: Array, key: Array, value: Array, i: int = i) -> Array:
            keys[i] = keys[i].at[row, slots.position].set(key[:, 0])
            values[i] = values[i].at[row, slots.position].set(value[:, 0])
            return attention(query, keys[i], values[i], visible)

        hidden = block(arch, layer, hidden, slots.position[:, None], attend, adapter={}, adapter_scale=1.0)
    hidden = rms_norm(hidden[:, 0], params["final_norm"], arch.rms_norm_eps)
    new = draw(logits(params, hidden), slots.temperature, slots.seed, slots.count, config.head_size)

    at = jnp.where(slots.active, slots.count, config.max_new_tokens)  # an inactive slot's write is dropped
    write = lambda old, value: old.at[row, at].set(value, mode="drop")  # noqa: E731
    count = slots.count + slots.active
    stopped = slots.active & jnp.isin(new.tokens, jnp.array(config.stop_ids, jnp.int32))
    position = slots.position + slots.active
    return dataclasses.replace(
        slots,
        keys=tuple(keys),
        values=tuple(values),
        token=jnp.where(slots.active, new.tokens, slots.token),
        position=position,
        active=slots.active & ~stopped & (count < slots.limit) & (position < config.context),
        stopped=slots.stopped | stopped,
        count=count,
        tokens=write(slots.tokens, new.tokens),
        logprobs=write(slots.logprobs, new.logprobs),
        head_ids=write(slots.head_ids, new.head_ids),
        head_logprobs=write(slots.head_logprobs, new.head_logprobs),
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(arch: Architecture, config: SamplerConfig, params: Params, slots: Slots) -> Slots:
    """Up to `config.steps` tokens in every active slot; returns early when none is active."""

    def more(carry: tuple[Array, Slots]) -> Array:
        return (carry[0] < config.steps) & carry[1].active.any()

    def body(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        return carry[0] + 1, _step(arch, config, params, carry[1])

    return jax.lax.while_loop(more, body, (jnp.int32(0), slots))[1]
