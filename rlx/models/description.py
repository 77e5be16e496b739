"""What a model is, said in frozen dataclasses: a model here is a description, never a copy of another's code.

An `Architecture` is a stack of layers; a `Layer` is a mixer (what moves information between tokens), an MLP and where
their norms stand. Consecutive layers that repeat form a `Group` whose parameters are stacked, [repeats, ...] for each
layer of its pattern, and are run by one scan; odd layers at either end are groups of their own.

To add a family: describe its config.json in `models/families.py`. To add a kind of layer: its dataclass here, a file
with its functions, and a line in `models/kinds.py`. `models/hf.py` has the names of checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

Params = dict  # nested dicts of arrays (or of ParamSpec, or of adapters): a plain pytree

# How RMSNorm casts and multiplies: x̂ in the model's dtype, then times w | times w in float32, then cast | times (1 + w)
# in float32, then cast. In float32 the first two are the same.
NormKind = Literal["cast_first", "multiply_first", "zero_centred"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. `axes` names each dimension for sharding rules; the leading "layer" axis stacks the repeats."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initializer: Literal["normal", "ones", "zeros"]
    # Projections that a kernel holds side by side, with their outputs: LoRA adapts each on its own.
    parts: tuple[tuple[str, int], ...] = ()


# -------------------------------------------------------------------------------------------------------------- mixers


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept, a ramp between them."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    table_scale: float  # of cos and sin


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) of the first `dim` dimensions of a head."""

    theta: float
    dim: int
    interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + dim / 2)
    yarn: Yarn | None = None


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention (arXiv 2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    bias: bool = False  # of q, k and v
    norm: Literal["none", "head", "width"] = "none"  # of queries and keys: none | each head | all heads together
    gated: bool = False  # times sigmoid of a gate that q_proj makes beside each head's query
    window: int | None = None  # a token sees this many, itself included


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one latent a token."""

    heads: int
    nope_dim: int
    rope_dim: int  # dimensions of the key that all heads share, rotated where `rope` is given
    value_dim: int
    query_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    rope: Rope | None
    scale: float  # of the scores
    gated: bool = False  # times sigmoid(g_proj x) before o_proj


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule with one decay a head (Gated DeltaNet, arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    # How projections are stored: one for q|k|v, and z, b, a | q|k|v|z and b|a grouped by key head | all apart.
    form: Literal["fused", "grouped", "apart"]
    negative_eigenvalues: bool  # beta in (0, 2)
    eps: float  # of the norm of the output


@dataclasses.dataclass(frozen=True)
class KimiDelta:
    """Gated delta rule with a decay for each channel (Kimi Delta Attention, arXiv 2510.26692)."""

    heads: int
    head_dim: int
    conv_width: int
    full_rank_gate: bool  # g_proj, not g_b_proj after g_a_proj
    lower_bound: float | None  # decays are lower_bound * sigmoid(...), not -exp(A) softplus(...)
    decay_slots: int  # entries of A_log as stored; those beyond `heads` are padding
    eps: float


Mixer = Attention | LatentAttention | DeltaNet | KimiDelta

# ---------------------------------------------------------------------------------------------------------------- MLPs


@dataclasses.dataclass(frozen=True)
class Situ:
    """SiTU-GLU: b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2), in float32."""

    gate_bound: float
    up_bound: float


@dataclasses.dataclass(frozen=True)
class Mlp:
    """down(act(gate x) * up x): SwiGLU (arXiv 2002.05202) where `situ` is None."""

    width: int
    situ: Situ | None = None


@dataclasses.dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights."""

    scoring: Literal["softmax", "sigmoid"]
    normalise: bool  # the weights of the chosen are divided by their sum
    bias: bool = False  # a correction added to the scores for the choice alone (arXiv 2408.15664)
    groups: int = 1  # experts are chosen among those of the best `top_groups` groups
    top_groups: int = 1
    scale: float = 1.0  # of the weights


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts, with one that every token goes to where `shared_width` is not 0."""

    count: int
    top_k: int
    width: int
    router: Router
    shared_width: int = 0
    shared_gated: bool = False  # times sigmoid(shared_gate x)
    latent: int | None = None  # routed experts work in a projection of this width
    latent_norm: bool = False  # RMSNorm of their sum before it is projected back
    situ: Situ | None = None


Feed = Mlp | Experts

# --------------------------------------------------------------------------------------------------------------- model


@dataclasses.dataclass(frozen=True)
class Layer:
    mixer: Mixer
    mlp: Feed
    norms: Literal["pre", "post"] = "pre"  # h + f(norm(h)) | h + norm(f(h))


@dataclasses.dataclass(frozen=True)
class Group:
    """`pattern` repeated `repeats` times."""

    pattern: tuple[Layer, ...]
    repeats: int


class Slot(NamedTuple):
    """A layer of a group's pattern: params["layers"][name] holds its `repeats` layers, stacked."""

    name: str
    layer: Layer
    numbers: tuple[int, ...]  # of its layers in the model


@dataclasses.dataclass(frozen=True)
class Names:
    """What differs between checkpoints in the names of tensors; `models/hf.py` has what does not."""

    model: str = "model."  # before embed_tokens, layers and norm
    head: str = "lm_head.weight"
    experts: str = "mlp"  # the module of a mixture of experts
    shared: str = "shared_expert"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_experts: bool = False  # all experts of a layer in experts.gate_up_proj and experts.down_proj
    pre_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    recurrent: str = "linear_attn"  # the module of a recurrent mixer
    recurrent_out: tuple[str, str] = ("out_proj", "norm")  # its output projection and norm
    even_convolutions: bool = False  # q|k|v cut into three of one size, as transformers 5 saves OLMo hybrids


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder. `config` is the config.json it was read from, written back on saving; it decides nothing else."""

    model_type: str
    vocab_size: int
    hidden_size: int
    groups: tuple[Group, ...]
    norm: NormKind
    rms_norm_eps: float
    tied: bool  # the output head is the embedding
    max_positions: int
    residual_block: int | None = None  # attention residuals (Kimi K3): a snapshot of the stream every so many layers
    names: Names = Names()
    config: str = dataclasses.field(default="{}", compare=False, repr=False)  # JSON

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for group in self.groups for layer in group.pattern * group.repeats)

    @property
    def num_layers(self) -> int:
        return sum(len(group.pattern) * group.repeats for group in self.groups)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary embeddings of its layers, in the order of their first use."""
        ropes = (layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, Attention | LatentAttention))
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of its attention layers, None = the whole sequence."""
        mixers = [layer.mixer for layer in self.layers]
        attending = [m for m in mixers if isinstance(m, Attention | LatentAttention)]
        return tuple(dict.fromkeys(m.window if isinstance(m, Attention) else None for m in attending))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that are mixtures of experts."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts))


def slots(arch: Architecture) -> Iterator[Slot]:
    """In the order of the model's layers; names count up over all groups."""
    name = start = 0
    for group in arch.groups:
        size = len(group.pattern)
        for i, layer in enumerate(group.pattern):
            yield Slot(str(name), layer, tuple(range(start + i, start + size * group.repeats, size)))
            name += 1
        start += size * group.repeats


def group_slots(arch: Architecture) -> Iterator[tuple[Slot, ...]]:
    """The slots of each group."""
    every = slots(arch)
    for group in arch.groups:
        yield tuple(next(every) for _ in group.pattern)


def grouped(layers: tuple[Layer, ...]) -> tuple[Group, ...]:
    """`layers` as groups: the stretch that covers most layers by repeating a pattern, the shortest such pattern, and
    what is before and after it as patterns that are run once."""
    best = (len(layers), 0, len(layers), 1) if len(layers) == 1 else (0, 0, 0, 0)  # covered, start, size, repeats
    for size in range(1, len(layers) // 2 + 1):
        for start in range(len(layers) - 2 * size + 1):
            pattern, repeats = layers[start : start + size], 1
            while layers[start + repeats * size : start + (repeats + 1) * size] == pattern:
                repeats += 1
            if repeats > 1 and repeats * size > best[0]:
                best = (repeats * size, start, size, repeats)
    covered, start, size, repeats = best
    if not covered:
        return (Group(layers, 1),)
    parts = (
        Group(layers[:start], 1),
        Group(layers[start : start + size], repeats),
        Group(layers[start + covered :], 1),
    )
    return tuple(group for group in parts if group.pattern)
