"""Four dense blocks of Qwen3's kind, to verify layouts with: sizes that TP4, PP3 and CP2 divide.

rlx verify-layout --config=configs/tiny_dense.py --layout="TP2 DP2 CP2"
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_dense"
    c.model.path = "configs/architectures/tiny_dense"
    return c
