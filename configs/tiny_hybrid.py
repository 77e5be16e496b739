"""Four times three gated delta net layers and one of attention, Qwen3.5's pattern, to verify layouts with.

rlx verify-layout --config=configs/tiny_hybrid.py --layout="TP2 DP2 CP2"
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_hybrid"
    c.model.path = "configs/architectures/tiny_hybrid"
    c.lora.targets = ("self_attn.*", "linear_attn.*")
    return c
