"""Plain on-policy distillation (arXiv 2306.13649): the target becomes like the proxy's expert. Proxy OPD's baseline.

python -m experiments.popd.prepare                 models, tasks and signals of the study, in minutes on two cores
rlx train --config=configs/opd.py
rlx train --config=configs/opd.py:rewarded         OPD-FT: only samples that were rewarded
rlx train --config=configs/opd.py:agreeing         OPD-URM: only tokens that the reward does not contradict
"""

from ml_collections import ConfigDict

from configs import popd, rl

VARIANTS = ("", "rewarded", "agreeing")


def get_config(variant: str = "") -> ConfigDict:
    c = rl.get_config()
    c.run.name = "opd" + (f"_{variant}" if variant else "")
    popd.distilled(c)
    c.objective.distill.signal = "teacher"
    c.objective.distill.lam = 1.0
    c.frozen.teachers = (f"{rl.HOME}/mid_expert_seed=0/model",)
    if variant:
        c.objective.distill.filter = variant
        c.objective.advantage = "none" if variant == "rewarded" else "group_mean"
    popd.guarded(c)
    c.collapse.reward_drop = 0.0  # a teacher that is worse than the target lowers its reward: that is the baseline
    return c
