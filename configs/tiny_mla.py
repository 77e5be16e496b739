"""Latent attention and sigmoid-routed experts after one dense layer, DeepSeek-V3's kind, to verify layouts with.

rlx verify-layout --config=configs/tiny_mla.py --layout="TP2 DP2 CP2"
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_mla"
    c.model.path = "configs/architectures/tiny_mla"
    c.lora.targets = ("self_attn.*", "experts.*")
    return c
