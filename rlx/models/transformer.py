"""The forward pass of a dense decoder over packed rows: token ids in, hidden states out.

It returns hidden states, never logits: the head is joined to the objective in `learner/step.py`, where logits [T, V]
never exist whole. `block` is also what the sampler runs over its cache, so that there is one forward pass to get right.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rlx.models.layers import attention, linear, packed_causal_mask, rms_norm, rope
from rlx.models.spec import Architecture, Params

# (query, key, value) of one block -> attention output; the caller decides what the keys are: the row or a cache.
Attend = Callable[[Array, Array, Array], Array]


def block(
    arch: Architecture,
    layer: Params,
    hidden: Float[Array, "rows t d"],
    positions: Int[Array, "rows t"],
    attend: Attend,
    *,
    adapter: Params,
    adapter_scale: float,
) -> Float[Array, "rows t d"]:
    """One pre-norm block: hidden + attention, then + SwiGLU. `layer` has no leading layer axis."""
    rows, length, _ = hidden.shape

    def project(name: str, x: Array) -> Array:
        return linear(x, layer[name], adapter.get(name), adapter_scale)

    def heads(name: str, x: Array, count: int) -> Array:
        return project(name, x).reshape(rows, length, count, arch.head_dim)

    x = rms_norm(hidden, layer["input_layernorm"], arch.rms_norm_eps)
    query = heads("q_proj", x, arch.num_heads)
    key = heads("k_proj", x, arch.num_kv_heads)
    value = heads("v_proj", x, arch.num_kv_heads)
    if arch.qk_norm:
        query = rms_norm(query, layer["q_norm"], arch.rms_norm_eps)
        key = rms_norm(key, layer["k_norm"], arch.rms_norm_eps)
    query, key = rope(query, positions, arch.rope_theta), rope(key, positions, arch.rope_theta)
    mixed = attend(query, key, value).reshape(rows, length, arch.num_heads * arch.head_dim)
    hidden = hidden + project("o_proj", mixed)

    x = rms_norm(hidden, layer["post_attention_layernorm"], arch.rms_norm_eps)
    return hidden + project("down_proj", jax.nn.silu(project("gate_proj", x)) * project("up_proj", x))


def forward(
    arch: Architecture,
    params: Params,
    tokens: Int[Array, "rows t"],
    positions: Int[Array, "rows t"],
    segment_ids: Int[Array, "rows t"],
    *,
    adapter: Params | None = None,
    adapter_scale: float = 1.0,
    remat: bool = False,
) -> Float[Array, "rows t d"]:
    """Hidden states after the final norm.

    Args:
      tokens: ids in [0, vocab_size); what padding (segment 0) holds does not matter to other segments.
      positions: of each token in its own segment, from 0.
      segment_ids: which packed sequence a token belongs to, 0 = padding.
      adapter: LoRA tree (see `models.lora`), added to the linear layers it names.
      remat: recompute each block's activations in the backward pass.
    """
    allowed = packed_causal_mask(positions, segment_ids)

    def step(hidden: Array, xs: tuple[Params, Params]) -> tuple[Array, None]:
        layer, low_rank = xs
        attend = lambda q, k, v: attention(q, k, v, allowed)  # noqa: E731
        return block(arch, layer, hidden, positions, attend, adapter=low_rank, adapter_scale=adapter_scale), None

    if remat:
        step = jax.checkpoint(step)
    hidden = params["embed"][tokens]
    hidden, _ = jax.lax.scan(step, hidden, (params["layers"], adapter or {}))
    return rms_norm(hidden, params["final_norm"], arch.rms_norm_eps)


def head_matrix(params: Params) -> Float[Array, "vocab d"]:
    """The output head; the embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
    """Dense logits in float32: for checks and for a sampler's last position, not for training."""
    return jnp.einsum("...d,vd->...v", hidden, head_matrix(params), preferred_element_type=jnp.float32)
