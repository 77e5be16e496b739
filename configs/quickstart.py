"""GRPO-style RL of SmolLM2-135M-Instruct on sums of one and two digits, on two CPU cores.

make train
rlx train --config=configs/quickstart.py --config.learner.learning_rate=5e-4
rlx train --config=configs/quickstart.py:smoke    two updates, to see that everything works
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = ("", "smoke")


def get_config(variant: str = "") -> ConfigDict:
    c = base.get_config()
    c.run.name = "quickstart"
    c.model.path = "models/smollm2-135m-instruct"
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    two_digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    # The easy sums give the first groups with mixed rewards; there are only 200 of them.
    c.tasks.sources.one_digit = base.source(dataset="chain_sum", options=ConfigDict(one_digit), size=1000, weight=0.3)
    c.tasks.sources.two_digits = base.source(dataset="chain_sum", options=ConfigDict(two_digits), size=4000, weight=0.7)
    c.tasks.system_prompt = "Give only the result."  # shorter than the one that SmolLM2's template adds
    c.tasks.held_out = 100
    c.rollout.tasks_per_update = 16
    c.eval.attempts_per_task = 4
    c.rollout.max_new_tokens = 20
    c.engine.context = 96
    c.engine.prefill_buckets = (64,)
    c.learner.updates = 24
    c.learner.learning_rate = 1e-3
    c.learner.schedule = "linear"
    c.learner.final_learning_rate_fraction = 0.1
    c.learner.micro_batch_rows = 2
    c.checkpoint.every = 10
    if variant == "smoke":
        c.run.name = "smoke"
        c.learner.updates = 2
        c.tasks.held_out = 20
        c.eval.attempts_per_task = 2
    return c
