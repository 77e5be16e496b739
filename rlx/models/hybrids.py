"""The families that mix attention with recurrent layers: from a config.json to the layers of an `Architecture`.

A function reads the keys that decide what its layers are and refuses values whose meaning is not implemented.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlx.models.config_values import Config, integer, layer_kinds, read_rope, refuse, required
from rlx.models.description import (
    Attention,
    DeltaNet,
    Experts,
    KimiDelta,
    LatentAttention,
    Layer,
    Mlp,
    Names,
    Rope,
    Router,
    Situ,
)
from rlx.models.families import Description, Family, read_latent_attention, read_sigmoid_experts

RECURRENT, ATTENDING = "linear_attention", "full_attention"
KIMI_NAMES = Names(
    experts="block_sparse_moe",
    shared="shared_experts",
    expert_parts=("w1", "w3", "w2"),
    recurrent="self_attn",
    recurrent_out=("o_proj", "o_norm"),
)


def describe_qwen_hybrid(config: Config) -> Description:
    """Qwen3-Next, Qwen3.5 and Qwen3.6: Gated DeltaNet, and gated attention every fourth layer."""
    model_type = str(config["model_type"])
    refuse(
        config,
        {
            "attention_bias": config.get("attention_bias") and "biases of attention are not implemented",
            "attn_output_gate": config.get("attn_output_gate", True) is not True and "attention has a gate here",
            "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1 and "every layer has experts here",
            "mlp_only_layers": config.get("mlp_only_layers") and "every layer has experts here",
        },
    )
    head_dim = integer(config, "head_dim")
    attention = Attention(*_attention_heads(config), head_dim, read_rope(config, head_dim), norm="head", gated=True)
    form = "grouped" if model_type == "qwen3_next" else "fused"
    delta = _delta_net(config, form, float(required(config, "rms_norm_eps")), negative_eigenvalues=False)
    mlp = _softmax_experts(config) if config.get("num_experts") else Mlp(integer(config, "intermediate_size"))
    kinds = layer_kinds(config, (RECURRENT, ATTENDING), _every(config, int(config.get("full_attention_interval") or 4)))
    layers = tuple(Layer(delta if kind == RECURRENT else attention, mlp) for kind in kinds)
    return Description(layers, norm="zero_centred")


def describe_qwen_tower(config: Config) -> Description:
    """The language model of a vision-language checkpoint of Qwen3.5 and 3.6, experts fused as they are on the hub."""
    names = Names(model="model.language_model.", fused_experts=True)
    return describe_qwen_hybrid(config)._replace(names=names)


def describe_olmo_hybrid(config: Config) -> Description:
    """OLMo hybrids: Gated DeltaNet with norms before, attention with norms after; rotary positions where config.json
    gives a rope_theta, none where it does not."""
    refuse(config, {"attention_bias": config.get("attention_bias") and "biases of attention are not implemented"})
    heads, kv_heads = _attention_heads(config)
    head_dim = int(config.get("head_dim") or integer(config, "hidden_size") // heads)
    attention = Attention(heads, kv_heads, head_dim, _optional_rope(config, head_dim), norm="width")
    negative = bool(required(config, "linear_allow_neg_eigval"))
    delta = _delta_net(config, "apart", 1e-5, negative_eigenvalues=negative)
    mlp = Mlp(integer(config, "intermediate_size"))
    layers = {RECURRENT: Layer(delta, mlp), ATTENDING: Layer(attention, mlp, "post")}
    kinds = layer_kinds(config, (RECURRENT, ATTENDING), _every(config, 4))
    names = Names(pre_norms=("attention_layer_norm", "feedforward_layer_norm"), recurrent_out=("o_proj", "o_norm"))
    return Description(tuple(layers[kind] for kind in kinds), norm="multiply_first", names=names)


def describe_kimi_linear(config: Config) -> Description:
    """Kimi Linear: Kimi Delta Attention and latent attention without rotary positions, sigmoid experts."""
    _refuse_kimi(config, "silu")
    experts = read_sigmoid_experts(
        config, "num_experts", "num_experts_per_token", "num_shared_experts", "num_expert_group"
    )
    attention = read_latent_attention(config, rotated=False)
    delta = _kimi_delta(config, padded=False)
    layers = _kimi_layers(config, delta, attention, Mlp(integer(config, "intermediate_size")), experts)
    return Description(layers, names=KIMI_NAMES)


def describe_kimi_k3(config: Config) -> Description:
    """Kimi K3 and K3.1: Kimi Delta Attention, gated latent attention, experts in a latent, attention residuals."""
    _refuse_kimi(config, "situ")
    situ = Situ(float(required(config, "activation_situ_beta")), float(required(config, "activation_situ_linear_beta")))
    experts = read_sigmoid_experts(
        config,
        "num_experts",
        "num_experts_per_token",
        "num_shared_experts",
        "num_expert_group",
        latent=integer(config, "routed_expert_hidden_size"),
        latent_norm=bool(required(config, "latent_moe_use_norm")),
        situ=situ,
    )
    attention = read_latent_attention(config, rotated=False, gated=bool(required(config, "mla_use_output_gate")))
    delta = _kimi_delta(config, padded=True)
    layers = _kimi_layers(config, delta, attention, Mlp(integer(config, "intermediate_size"), situ), experts)
    names = dataclasses.replace(KIMI_NAMES, model="language_model.model.", head="language_model.lm_head.weight")
    return Description(layers, names=names, residual_block=integer(config, "attn_res_block_size"))


def _delta_net(config: Config, form: Any, eps: float, *, negative_eigenvalues: bool) -> DeltaNet:
    key_heads, value_heads = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise ValueError(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    return DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_width=integer(config, "linear_conv_kernel_dim"),
        form=form,
        negative_eigenvalues=negative_eigenvalues,
        eps=eps,
    )


def _softmax_experts(config: Config) -> Experts:
    """Their weights always add up to 1: Qwen3.5 has no key for it, and in Qwen3-Next it is never false."""
    if not config.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob False is not supported: the weights of the chosen experts add up to 1 here")
    return Experts(
        integer(config, "num_experts"),
        integer(config, "num_experts_per_tok"),
        integer(config, "moe_intermediate_size"),
        Router("softmax", normalise=True),
        shared_width=integer(config, "shared_expert_intermediate_size"),
        shared_gated=True,
    )


def _kimi_delta(config: Config, *, padded: bool) -> KimiDelta:
    linear = required(config, "linear_attn_config")
    heads, head_dim = integer(linear, "num_heads"), integer(linear, "head_dim")
    bound = linear.get("gate_lower_bound")
    return KimiDelta(
        heads=heads,
        head_dim=head_dim,
        conv_width=integer(linear, "short_conv_kernel_size"),
        full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
        lower_bound=None if bound is None else float(bound),
        decay_slots=head_dim if padded else heads,
        eps=float(required(config, "rms_norm_eps")),
    )


def _kimi_layers(
    config: Config, delta: KimiDelta, attention: LatentAttention, dense: Mlp, experts: Experts
) -> tuple[Layer, ...]:
    """`linear_attn_config` counts layers from 1."""
    linear, count = required(config, "linear_attn_config"), integer(config, "num_hidden_layers")
    every, attending = set(range(1, count + 1)), set(required(linear, "full_attn_layers"))
    recurrent = set(linear.get("kda_layers") or every - attending)
    if recurrent & attending or (recurrent | attending) != every:
        raise ValueError(
            f"linear_attn_config: kda_layers {sorted(recurrent)} and full_attn_layers {sorted(attending)} must be the "
            f"layers 1 to {count}, each once"
        )
    first = int(config.get("first_k_dense_replace") or 0)
    return tuple(
        Layer(delta if i + 1 in recurrent else attention, dense if i < first else experts) for i in range(count)
    )


def _refuse_kimi(config: Config, activation: str) -> None:
    refuse(
        config,
        {
            "hidden_act": config.get("hidden_act", activation) != activation and f"{activation} is what it has here",
            "mla_use_nope": config.get("mla_use_nope", True) is not True and "latent attention is not rotated here",
            "moe_layer_freq": config.get("moe_layer_freq", 1) != 1 and "every layer after the dense ones has experts",
            "moe_router_activation_func": config.get("moe_router_activation_func", "sigmoid") != "sigmoid"
            and "scores are sigmoids here",
        },
    )


def _attention_heads(config: Config) -> tuple[int, int]:
    heads, kv_heads = integer(config, "num_attention_heads"), integer(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return heads, kv_heads


def _optional_rope(config: Config, head_dim: int) -> Rope | None:
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    given = any(place.get("rope_theta") is not None for place in places)
    return read_rope(config, head_dim) if given else None


def _every(config: Config, interval: int) -> tuple[str, ...]:
    """Attention at every `interval`-th layer."""
    count = integer(config, "num_hidden_layers")
    return tuple(RECURRENT if (i + 1) % interval else ATTENDING for i in range(count))


HYBRIDS = {
    "qwen3_next": Family(describe_qwen_hybrid, ("Qwen3NextForCausalLM",)),
    "qwen3_5_text": Family(describe_qwen_hybrid, ("Qwen3_5ForCausalLM",)),
    "qwen3_5_moe_text": Family(describe_qwen_hybrid, ("Qwen3_5MoeForCausalLM",)),
    "qwen3_5": Family(describe_qwen_tower, ("Qwen3_5ForConditionalGeneration",)),
    "qwen3_5_moe": Family(describe_qwen_tower, ("Qwen3_5MoeForConditionalGeneration",)),
    "olmo_hybrid": Family(describe_olmo_hybrid, ("OlmoHybridForCausalLM",)),
    "kimi_linear": Family(describe_kimi_linear, ("KimiLinearForCausalLM",)),
    "kimi_k3": Family(describe_kimi_k3, ("KimiK3ForConditionalGeneration",)),
}
