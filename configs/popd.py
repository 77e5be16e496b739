"""Proxy OPD (arXiv 2607.11505): what RL taught a small proxy moves onto a target that learns on its own rollouts.

python -m experiments.popd.prepare                 models, tasks and signals of the study, in minutes on two cores
rlx train --config=configs/popd.py
rlx train --config=configs/popd.py:small           the signal of a smaller proxy
rlx train --config=configs/popd.py:both            both signals, weighted

docs/popd.md says how a signal is made and lambda chosen.
"""

from ml_collections import ConfigDict

from configs import rl

VARIANTS = ("", "small", "both")


def get_config(variant: str = "") -> ConfigDict:
    c = rl.get_config()
    c.run.name = "popd" + (f"_{variant}" if variant else "")
    distilled(c)
    c.objective.distill.signal = "proxy"
    c.objective.distill.lam = 1.0
    names = {"": ("mid",), "small": ("small",), "both": ("mid", "small")}[variant]
    c.frozen.signals = tuple(f"{rl.HOME}/signals/{name}_seed=0" for name in names)
    c.objective.distill.weights = (1.0 / len(names),) * len(names)
    guarded(c)
    return c


def distilled(c: ConfigDict) -> None:
    """Credit by token from frozen models, summed over the whole vocabulary, which is small here."""
    c.objective.loss = "reinforce"
    c.objective.distill.form = "full"
    c.rollout.filter_no_signal = False


def guarded(c: ConfigDict) -> None:
    """What stops a run whose lambda is too small."""
    c.collapse.reward_drop = 0.2
    c.collapse.entropy_growth = 5.0
    c.collapse.repetition = 0.5
    c.collapse.length_factor = 2.0
