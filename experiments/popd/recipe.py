"""One model's base, or RL of it, for the transfer study; transfers have configs/rl.py, opd.py and popd.py.

rlx sft --config=experiments/popd/recipe.py:mid_base
rlx train --config=experiments/popd/recipe.py:mid
"""

from ml_collections import ConfigDict

from configs import rl
from experiments.popd.models import SIZES

VARIANTS = tuple(f"{name}{phase}" for name in SIZES for phase in ("", "_base"))
EXPERT_UPDATES = 24  # so few that the target still passes more often than what becomes of the proxies


def get_config(variant: str) -> ConfigDict:
    name, _, phase = variant.partition("_")
    c = rl.get_config()
    c.run.name = variant
    c.model.path = f"{rl.HOME}/{name}_base/sft"
    c.learner.updates = EXPERT_UPDATES
    c.eval.every = 0
    if phase:
        c.model.path = f"{rl.HOME}/{name}_random"
        c.sft.path = f"{rl.HOME}/examples_{name}.jsonl"
        c.sft.steps = SIZES[name].steps
        c.sft.batch_size = 64
        c.sft.learning_rate = 2e-3
        c.sft.save_every = 600
        c.learner.micro_batch_rows = 8
    return c
