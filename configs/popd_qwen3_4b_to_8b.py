"""The published transfer of a 4B proxy onto Qwen3-8B (arXiv 2607.11505), on the hardware that it needs.

rlx signal create --base=models/qwen3-4b --expert=runs/qwen3_4b_rl/model --to=signals/qwen3_4b
rlx train --config=configs/popd_qwen3_4b_to_8b.py --config.tasks.sources.math.path=math.jsonl

As configs/popd_qwen3_17b_to_8b.py in everything but the signal and its lambda. Published: lambda 0.5 30.9, 0.75 44.1,
0.95 44.5, 1.0 44.9, 1.1 45.2, 1.5 38.7 and 0 collapses; the best fitted to these is 1.08. The proxy's own RL is 128
prompts x 8 samples, 500 updates, LR 1e-6.
"""

from ml_collections import ConfigDict

from configs import popd_qwen3_17b_to_8b

LAM = 1.08


def get_config() -> ConfigDict:
    c = popd_qwen3_17b_to_8b.get_config()
    c.run.name = "popd_qwen3_4b_to_8b"
    c.objective.distill.lam = LAM
    c.frozen.signals = ("signals/qwen3_4b",)
    return c
