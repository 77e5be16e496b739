"""The families of models: from a config.json to the layers of an `Architecture`, one function a family.

A function reads the keys that decide what its layers are and refuses values whose meaning is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlx.models.config_values import Config, integer, layer_kinds, read_rope, refuse, required, rope_values
from rlx.models.description import Attention, Experts, LatentAttention, Layer, Mlp, Names, NormKind, Router
from rlx.models.rope import yarn_scale


class Description(NamedTuple):
    """What differs between families."""

    layers: tuple[Layer, ...]
    norm: NormKind = "cast_first"
    names: Names = Names()
    residual_block: int | None = None


class Family(NamedTuple):
    describe: Callable[[Config], Description]  # of the language model's part of config.json
    classes: tuple[str, ...]  # of transformers, that are read


def describe_dense(config: Config) -> Description:
    """Qwen2, Qwen2.5, Qwen3."""
    qwen2, bias = config["model_type"] == "qwen2", config.get("attention_bias")
    refuse(
        config,
        {
            "use_sliding_window": config.get("use_sliding_window") and "every layer attends to the whole sequence here",
            "attention_bias": (
                (bias is False and "qwen2 has biases on q, k and v; write zeros where the model has none")
                if qwen2
                else (bias and "biases of qwen3's attention are not implemented")
            ),
        },
    )
    mixer = _attention(config, bias=qwen2, norm="none" if qwen2 else "head", derived_head_dim=qwen2)
    mlp = Mlp(integer(config, "intermediate_size"))
    return Description(tuple(Layer(mixer, mlp) for _ in _all_attending(config)))


def describe_qwen3_moe(config: Config) -> Description:
    refuse(
        config,
        {
            "use_sliding_window": config.get("use_sliding_window") and "every layer attends to the whole sequence here",
            "attention_bias": config.get("attention_bias") and "biases of attention are not implemented",
        },
    )
    mixer = _attention(config, norm="head")
    router = Router("softmax", normalise=bool(required(config, "norm_topk_prob")))
    count = integer(config, "num_experts" if "num_experts" in config else "num_local_experts")
    experts = Experts(count, integer(config, "num_experts_per_tok"), integer(config, "moe_intermediate_size"), router)
    dense, every = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    return Description(
        tuple(
            Layer(mixer, Mlp(integer(config, "intermediate_size")) if i in dense or (i + 1) % every else experts)
            for i, _ in enumerate(_all_attending(config))
        )
    )


def describe_olmoe(config: Config) -> Description:
    refuse(
        config,
        {
            "clip_qkv": config.get("clip_qkv") is not None and "clipping of queries and keys is not implemented",
            "attention_bias": config.get("attention_bias") and "biases of attention are not implemented",
        },
    )
    mixer = _attention(config, norm="width", derived_head_dim=True)
    router = Router("softmax", normalise=bool(required(config, "norm_topk_prob")))
    count, top_k = integer(config, "num_experts"), integer(config, "num_experts_per_tok")
    experts = Experts(count, top_k, integer(config, "intermediate_size"), router)
    return Description(tuple(Layer(mixer, experts) for _ in _all_attending(config)))


def describe_olmo(config: Config) -> Description:
    """OLMo 2 and 3: norms after the sub-layers; OLMo 3 with sliding windows and rotary positions by kind of layer."""
    refuse(config, {"attention_bias": config.get("attention_bias") and "biases of attention are not implemented"})
    mlp = Mlp(integer(config, "intermediate_size"))

    def layer(kind: str) -> Layer:
        window = integer(config, "sliding_window") if kind == "sliding_attention" else None
        mixer = _attention(config, norm="width", window=window, kind=kind, derived_head_dim=True)
        return Layer(mixer, mlp, norms="post")

    if config["model_type"] == "olmo2":
        kinds = tuple(_all_attending(config))
    else:
        count = integer(config, "num_hidden_layers")
        default = tuple("full_attention" if i % 4 == 3 else "sliding_attention" for i in range(count))
        kinds = layer_kinds(config, ("sliding_attention", "full_attention"), default)
    return Description(tuple(layer(kind) for kind in kinds), norm="multiply_first")


def describe_deepseek_v3(config: Config) -> Description:
    """DeepSeek-V3 and Kimi K2: multi-head latent attention, dense layers first, then a sigmoid mixture of experts."""
    refuse(
        config,
        {
            "attention_bias": config.get("attention_bias") and "biases of attention are not implemented",
            "scoring_func": config.get("scoring_func", "sigmoid") != "sigmoid" and "only sigmoid scores are",
            "topk_method": config.get("topk_method", "noaux_tc") != "noaux_tc" and "only noaux_tc is",
            "moe_layer_freq": config.get("moe_layer_freq", 1) != 1 and "every layer after the dense ones has experts",
        },
    )
    mixer, dense = read_latent_attention(config), Mlp(integer(config, "intermediate_size"))
    experts = read_sigmoid_experts(config, "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")
    first = int(config.get("first_k_dense_replace") or 0)
    layers = tuple(Layer(mixer, dense if i < first else experts) for i, _ in enumerate(_all_attending(config)))
    return Description(layers, names=Names(shared="shared_experts"))


def read_latent_attention(config: Config, *, rotated: bool = True, gated: bool = False) -> LatentAttention:
    nope, rotary = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    rope, scale = None, (nope + rotary) ** -0.5
    if rotated:
        rope = read_rope(config, rotary, interleaved=bool(config.get("rope_interleave", True)))
        given = rope_values(config, None)
        if rope.yarn is not None and given.get("mscale_all_dim"):
            scale *= yarn_scale(rope.yarn.factor, float(given["mscale_all_dim"])) ** 2
    return LatentAttention(
        heads=integer(config, "num_attention_heads"),
        nope_dim=nope,
        rope_dim=rotary,
        value_dim=integer(config, "v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        kv_rank=integer(config, "kv_lora_rank"),
        rope=rope,
        scale=scale,
        gated=gated,
    )


def read_sigmoid_experts(config: Config, count: str, top_k: str, shared: str, groups: str, **more: Any) -> Experts:
    """The arguments name the keys, which differ between families; `more` are further fields of `Experts`."""
    normalise = "norm_topk_prob" if "norm_topk_prob" in config else "moe_renormalize"
    router = Router(
        "sigmoid",
        normalise=bool(required(config, normalise)),
        bias=True,
        groups=int(config.get(groups) or 1),
        top_groups=int(config.get("topk_group") or 1),
        scale=float(required(config, "routed_scaling_factor")),
    )
    width = integer(config, "moe_intermediate_size")
    experts, chosen = integer(config, count), integer(config, top_k)
    if experts % router.groups or chosen > router.top_groups * experts // router.groups:
        raise ValueError(
            f"{top_k} {chosen} of {count} {experts} cannot come from {router.top_groups} of {router.groups} groups"
        )
    return Experts(experts, chosen, width, router, shared_width=width * int(config.get(shared) or 0), **more)


def _all_attending(config: Config) -> tuple[str, ...]:
    count = integer(config, "num_hidden_layers")
    return layer_kinds(config, ("full_attention",), ("full_attention",) * count)


def _attention(
    config: Config,
    *,
    norm: Any,
    bias: bool = False,
    window: int | None = None,
    kind: str | None = None,
    derived_head_dim: bool = False,
) -> Attention:
    heads, kv_heads = integer(config, "num_attention_heads"), integer(config, "num_key_value_heads")
    head_dim = _head_dim(config, derived_head_dim)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return Attention(heads, kv_heads, head_dim, read_rope(config, head_dim, kind), bias, norm, window=window)


def _head_dim(config: Config, derived: bool) -> int:
    """`head_dim`, or, in families that may leave it out, what the heads make of the width."""
    if config.get("head_dim") is not None or not derived:
        return integer(config, "head_dim")
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is absent"
        )
    return hidden // heads


FAMILIES = {
    "qwen2": Family(describe_dense, ("Qwen2ForCausalLM",)),
    "qwen3": Family(describe_dense, ("Qwen3ForCausalLM",)),
    "qwen3_moe": Family(describe_qwen3_moe, ("Qwen3MoeForCausalLM",)),
    "olmo2": Family(describe_olmo, ("Olmo2ForCausalLM",)),
    "olmo3": Family(describe_olmo, ("Olmo3ForCausalLM",)),
    "olmoe": Family(describe_olmoe, ("OlmoeForCausalLM",)),
    "deepseek_v3": Family(describe_deepseek_v3, ("DeepseekV3ForCausalLM",)),
    "kimi_k2": Family(describe_deepseek_v3, ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")),
    "kimi_k25": Family(describe_deepseek_v3, ("KimiK25ForConditionalGeneration",)),
}
