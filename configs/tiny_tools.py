"""`configs/tiny.py` with sessions over turns: sums that a program in a sandbox may compute. It learns nothing of worth.

python -m rlx.models.presets models/tiny models/smollm2-135m-instruct
rlx train --config=configs/tiny_tools.py
"""

from ml_collections import ConfigDict

from configs import base, tiny


def get_config() -> ConfigDict:
    c = tiny.get_config()
    c.run.name = "tiny_tools"
    c.tasks.sources = {"sums": base.source(dataset="arithmetic", environment="python_tool", size=80)}
    c.tools.max_turns = 3
    c.rollout.max_new_tokens = 16
    c.producer.session_token_limit = 400  # a question has about 140 tokens, with what is said of the tool
    c.engine.context = 448
    c.engine.prefill_buckets = (384,)
    c.learner.row_tokens = 448
    c.learner.row_targets = 0  # every token: a session's responses are spread over it
    return c
