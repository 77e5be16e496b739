"""One run of the study: a model of `experiments.study.models` and what all of them share.

rlx sft --config=experiments/study/recipe.py:target_base
rlx train --config=experiments/study/recipe.py:target --config.learner.learning_rate=1e-3
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = tuple(f"{name}{phase}" for name in ("target", "small", "other") for phase in ("", "_base"))
HOME = "runs/study"


def get_config(variant: str) -> ConfigDict:
    name, _, phase = variant.partition("_")
    c = base.get_config()
    c.run.directory = HOME
    c.run.name = variant
    c.model.path = f"{HOME}/{name}_base/sft"
    c.lora.rank = 0
    c.tasks.sources.digits = base.source(path=f"{HOME}/tasks.jsonl")
    c.tasks.held_out = 60
    c.grader.workers = 1
    c.grader.extract = "all"
    c.rollout.tasks_per_update = 8
    c.rollout.max_new_tokens = 4
    c.rollout.head_size = 16
    c.producer.max_policy_lag = 2
    c.producer.sessions_in_flight = 128
    c.engine.slots = 64
    c.engine.context = 16
    c.engine.prefill_buckets = (8,)
    c.engine.steps_per_dispatch = 4
    c.learner.updates = 24
    c.learner.learning_rate = 3e-4
    c.learner.row_tokens = 64
    c.learner.micro_batch_rows = 16
    c.eval.attempts_per_task = 4
    c.checkpoint.every = 24
    c.checkpoint.keep = 1
    c.metrics.histograms_every = 24
    c.metrics.samples_every = 24
    c.metrics.skip_updates = 2
    if phase:
        c.model.path = f"{HOME}/{name}_random"
        c.sft.path = f"{HOME}/examples.jsonl"
        c.sft.steps = 600
        c.sft.batch_size = 64
        c.sft.learning_rate = 2e-3
        c.sft.save_every = 600
        c.learner.micro_batch_rows = 8
    return c
