"""Kimi K3's kind in small: delta and latent attention, latent experts, attention residuals; to verify layouts with.

rlx verify-layout --config=configs/tiny_k3.py --layout="TP2 DP2 CP2"
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_k3"
    c.model.path = "configs/architectures/tiny_k3"
    c.lora.targets = ("self_attn.*", "experts.*")
    return c
