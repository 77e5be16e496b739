"""Direct RL of a small target, with the budget of configs/opd.py and configs/popd.py: what these are compared with.

python -m experiments.popd.prepare                 models, tasks and signals of the study, in minutes on two cores
rlx train --config=configs/rl.py
rlx train --config=configs/rl.py:long              three times the updates
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = ("", "long")
HOME = "runs/popd"


def get_config(variant: str = "") -> ConfigDict:
    c = base.get_config()
    c.run.name = "rl"
    c.run.directory = HOME
    c.model.path = f"{HOME}/target_base/sft"
    c.lora.rank = 0
    c.tasks.sources.digits = base.source(path=f"{HOME}/tasks.jsonl")
    c.tasks.held_out = 100
    c.grader.workers = 1
    c.grader.extract = "all"
    c.rollout.tasks_per_update = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 6
    c.engine.slots = 64
    c.engine.context = 16
    c.engine.prefill_buckets = (8,)
    c.engine.steps_per_dispatch = 4
    c.learner.updates = 20
    c.learner.learning_rate = 3e-4
    c.learner.row_tokens = 64
    c.learner.micro_batch_rows = 16
    c.objective.centering = "off"
    c.eval.every = 5
    c.eval.attempts_per_task = 4
    c.checkpoint.every = 10
    c.checkpoint.keep = 1
    c.metrics.histograms_every = 20
    c.metrics.samples_every = 20
    c.metrics.skip_updates = 2
    if variant == "long":
        c.run.name = "rl_long"
        c.learner.updates = 60
    return c
