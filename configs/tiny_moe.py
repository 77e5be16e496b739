"""Four blocks of Qwen3's kind with 8 experts, to verify layouts with.

rlx verify-layout --config=configs/tiny_moe.py --layout="TP2 DP2 CP2"
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_moe"
    c.model.path = "configs/architectures/tiny_moe"
    c.lora.targets = ("self_attn.*", "experts.*")
    return c
