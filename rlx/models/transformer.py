"""The forward pass of a dense decoder over packed rows: token ids in, hidden states out.

It returns hidden states, never logits: the head is joined to the objective in `learner/step.py`, where logits [T, V]
never exist whole. `block` is also what the sampler runs over its cache, so that there is one forward pass to get right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rlx.models.layers import KEPT, linear, packed_causal_mask, rms_norm, rotary_tables, rotate
from rlx.models.packed_attention import packed_attention
from rlx.models.spec import LINEAR_NAMES, Architecture, Params, linear_shape

# (query, key, value) of one block -> attention output; the caller decides what the keys are: the row or a cache.
Attend = Callable[[Array, Array, Array], Array]

ATTENTION_ONLY = ("qwen2", "qwen3")

# What the backward pass recomputes of every block: nothing, all but matrix products and attention, everything.
Remat = Literal["none", "products", "layer"]


def block(
    arch: Architecture,
    layer: Params,
    hidden: Float[Array, "rows t d"],
    positions: Int[Array, "rows t"],
    attend: Attend,
    *,
    adapter: Params,
    adapter_scale: float,
    tables: tuple[Array, Array] | None = None,
) -> Float[Array, "rows t d"]:
    """One pre-norm block: hidden + attention, then + SwiGLU. `layer` has no leading layer axis.

    tables: `rotary_tables` of the positions, from callers that run many blocks over the same ones.
    """
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
    if tables is None:
        tables = rotary_tables(positions, arch.head_dim, arch.rope_theta)
    query, key = rotate(query, *tables), rotate(key, *tables)
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
    prefix_ids: Int[Array, "rows t"] | None = None,
    *,
    adapter: Params | None = None,
    adapter_scale: float = 1.0,
    remat: Remat = "none",
    unrolled: bool = False,
) -> Float[Array, "rows t d"]:
    """Hidden states after the final norm.

    Args:
      tokens: ids in [0, vocab_size); what padding (segment 0) holds does not matter to other segments.
      positions: of each token in its own sequence, its prefix included, from 0.
      segment_ids: which packed sequence a token belongs to, 0 = padding.
      prefix_ids: the segment that holds the beginning of this one's sequence, 0 = none: `packed_causal_mask`.
      adapter: LoRA tree (see `models.lora`), added to the linear layers it names.
      remat: what the backward pass recomputes.
      unrolled: one layer after the other in the program, not a loop over them. It is faster where what a layer keeps
        for the backward pass is much next to its arithmetic, as a loop copies that into arrays over layers and back;
        it compiles for as many times longer as there are layers.
    """
    allowed = packed_causal_mask(positions, segment_ids, prefix_ids)
    tables = rotary_tables(positions, arch.head_dim, arch.rope_theta)

    def step(hidden: Array, xs: tuple[Params, Params]) -> tuple[Array, None]:
        layer, low_rank = xs
        attend = lambda q, k, v: packed_attention(q, k, v, allowed)  # noqa: E731
        scale = adapter_scale
        hidden = block(arch, layer, hidden, positions, attend, adapter=low_rank, adapter_scale=scale, tables=tables)
        return hidden, None

    hidden = params["embed"][tokens]
    layers = (params["layers"], adapter or {})
    if unrolled:
        # Outside a loop the compiler would merge what is recomputed with what was computed.
        once = recomputed(step, remat, prevent_cse=True)
        for layer in unstacked(layers, arch.num_layers):
            hidden, _ = once(hidden, layer)
    else:
        hidden, _ = jax.lax.scan(recomputed(step, remat, prevent_cse=False), hidden, layers)
    return rms_norm(hidden, params["final_norm"], arch.rms_norm_eps)


def unstacked(layers: PyTree[Array], count: int) -> list[PyTree[Array]]:
    """The trees of single layers. The gradient of the stack is put together once, where that of slices is a sum."""
    leaves, structure = jax.tree.flatten(layers)
    parts = [[x[0] for x in jax.lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [structure.unflatten(part[i] for part in parts) for i in range(count)]


def recomputed(step: Callable, remat: Remat, *, prevent_cse: bool) -> Callable:
    """`step`, a block, with what its backward pass recomputes."""
    if remat == "none":
        return step
    policy = jax.checkpoint_policies.save_only_these_names(KEPT) if remat == "products" else None
    return jax.checkpoint(step, policy=policy, prevent_cse=prevent_cse)


def kept_bytes(arch: Architecture, itemsize: int) -> int:
    """Bytes for each token that remat = "products" keeps between the passes, the adapter's few left out."""
    inside = sum(linear_shape(arch, name)[1] for name in LINEAR_NAMES if name != "down_proj")
    block = arch.hidden_size + inside + arch.num_heads * arch.head_dim
    return arch.num_layers * (block * itemsize + arch.num_heads * 4)


def prefix_sharing_unsupported_reason(arch: Architecture) -> str | None:
    """Why segments of a row of this model cannot share a prefix, None if they can.

    Attention lets a token see the prefix wherever it lies in the row; a layer that carries a state from one token to
    the next would have to begin every segment with the state at the prefix's end.
    """
    if arch.model_type in ATTENTION_ONLY:
        return None
    return f"layers of model_type {arch.model_type!r} are not known to be attention only ({', '.join(ATTENTION_ONLY)})"


def head_matrix(params: Params) -> Float[Array, "vocab d"]:
    """The output head; the embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
    """Dense logits in float32: for checks and for a sampler's last position, not for training."""
    return jnp.einsum("...d,vd->...v", hidden, head_matrix(params), preferred_element_type=jnp.float32)
