"""RL of tool use: a model of `experiments.python_tool.models`, cold-started by `rlx sft`, learns to run programs.

python experiments/07_python_tool.py          everything: model, cold start, training, figures
rlx sft --config=experiments/python_tool/recipe.py:base
rlx train --config=experiments/python_tool/recipe.py
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = ("", "base")
HOME = "runs/python_tool"


def get_config(variant: str = "") -> ConfigDict:
    c = base.get_config()
    c.run.directory = HOME
    c.run.name = variant or "trained"
    c.model.path = f"{HOME}/base/sft"
    c.lora.rank = 0
    c.tasks.sources.arithmetic = base.source(path=f"{HOME}/tasks.jsonl", environment="python_tool")
    c.tasks.held_out = 100
    c.tools.format = "plain"
    c.tools.max_turns = 3
    c.grader.workers = 1
    c.rollout.tasks_per_update = 8
    c.rollout.max_new_tokens = 24
    c.rollout.head_size = 16
    c.producer.session_token_limit = 128
    c.engine.slots = 64
    c.engine.context = 160
    c.engine.prefill_buckets = (64, 96, 128)
    c.learner.updates = 60
    c.learner.learning_rate = 2e-4
    c.learner.row_tokens = 256
    c.learner.micro_batch_rows = 8
    c.eval.attempts_per_task = 4
    c.checkpoint.every = 10
    c.metrics.skip_updates = 2
    if variant == "base":
        c.model.path = f"{HOME}/random"
        c.sft.path = f"{HOME}/examples.jsonl"
        c.sft.steps = 500
        c.sft.batch_size = 32
        c.sft.learning_rate = 3e-3
        c.sft.save_every = 500
    return c
