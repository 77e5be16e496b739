"""Models at their full size, to be planned and simulated anywhere and trained where the hardware is.

rlx plan --config=configs/full_size.py:kimi_k2
rlx train --config=configs/full_size.py:qwen3_8b --config.model.path=/checkpoints/Qwen3-8B    on accelerators

`configs/architectures/` has the public hyper-parameters of each, a config.json without weights. A checkpoint's own
config.json is what counts: give its directory as config.model.path.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = (
    "qwen3_1_7b",
    "qwen3_4b",
    "qwen3_8b",
    "qwen2_5_7b",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "qwen3_next_80b_a3b",
    "qwen3_6_27b",
    "qwen3_6_35b_a3b",
    "kimi_k2",
    "kimi_linear_48b_a3b",
    "kimi_k3",
    "olmo3_7b",
    "olmo3_32b",
    "olmo_hybrid_7b",
)
# Families with layers that carry a state: what a prompt leaves behind cannot be shared in a row.
RECURRENT = ("qwen3_next", "qwen3_6", "kimi_linear", "kimi_k3", "olmo_hybrid")


def get_config(variant: str = "qwen3_8b") -> ConfigDict:
    c = base.get_config()
    c.run.name = variant
    c.model.path = f"configs/architectures/{variant}"
    c.model.dtype = "bfloat16"
    c.model.remat = "layer"
    c.lora.rank = 32
    c.lora.alpha = 64.0
    # Attention of every kind; of recurrent layers all projections too.
    c.lora.targets = ("self_attn.*", "linear_attn.*") if variant.startswith(RECURRENT) else ("self_attn.*",)
    if variant.startswith("kimi"):
        c.lora.targets = ("self_attn.*",)
    c.rollout.max_new_tokens = 8192
    c.engine.context = 16_384
    c.engine.prefill_buckets = (4096, 8192, 16_384)
    c.learner.row_tokens = 16_384
    c.learner.micro_batch_rows = 1
    c.learner.learning_rate = 5e-5
    c.learner.prefix_sharing = not variant.startswith(RECURRENT)
    return c
