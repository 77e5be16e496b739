"""A run of seconds, for checks of the machinery: a random model of two blocks, which learns nothing worth having.

python -m rlx.models.presets models/tiny models/smollm2-135m-instruct
rlx train --config=configs/tiny.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    c = base.get_config()
    c.run.name = "tiny"
    c.model.path = "models/tiny"
    c.lora.rank = 4
    c.lora.alpha = 8.0
    c.tasks.sources.sums = base.source(
        dataset="chain_sum",
        options=ConfigDict({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
        size=80,
    )
    c.tasks.held_out = 8
    c.grader.workers = 1
    c.rollout.tasks_per_update = 4
    c.rollout.group_size = 4
    c.rollout.max_new_tokens = 8
    c.rollout.head_size = 8
    c.rollout.filter_no_signal = False  # a random model passes so rarely that no update would be made
    c.engine.slots = 16
    c.engine.context = 160
    c.engine.prefill_buckets = (128,)
    c.engine.prefill_rows = 4
    c.engine.steps_per_dispatch = 4
    c.learner.updates = 3
    c.learner.learning_rate = 1e-2
    c.learner.row_tokens = 160
    c.learner.row_targets = 32
    c.learner.micro_batch_rows = 2
    c.checkpoint.every = 1
    c.metrics.histograms_every = 1
    c.metrics.samples_every = 1
    c.metrics.skip_updates = 1
    return c
