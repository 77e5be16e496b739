"""A large agentic run, to be simulated: 8 tasks x 8 samples an update, 96 sessions in flight, 2 engines x 64 requests.

rlx simulate --config=configs/simulate_target.py
rlx simulate --config=configs/simulate_target.py --sweep sessions_in_flight=48,96,192 --sweep max_policy_lag=1,4,8

The run that it is modelled on took about 25 minutes an update, of which its trainer trained 8. So, by Little's law, its
sessions took 96 / 64 x 25 = 37 minutes each, and had about 18,000 tokens. How those minutes divide into decoding and
waiting for tools is not known: the seconds of a tool are chosen here so that the sum comes out.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    c = base.get_config()
    c.run.name = "simulate_target"
    c.rollout.tasks_per_update = 8
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 8192  # of one turn
    c.producer.max_policy_lag = 4
    c.producer.sessions_in_flight = 96
    c.producer.train_token_limit = 24_576
    c.producer.environment_timeout_s = 1800.0  # of one call of a tool or a grader
    c.grader.workers = 64  # sandboxes that grade at once
    c.engine.slots = 64
    c.engine.context = 65_536
    c.learner.updates = 40
    c.learner.row_tokens = 65_536

    c.simulate.token_grain = 16
    c.simulate.engines.count = 2
    c.simulate.engines.step_seconds = 0.065  # with 30 requests 13 tokens/s each
    c.simulate.engines.step_seconds_per_request = 0.0004
    c.simulate.engines.prefill_tokens_per_s = 20_000.0
    c.simulate.engines.prefix_cache = True
    c.simulate.engines.load_seconds = 20.0
    c.simulate.sessions.tasks = 22
    c.simulate.sessions.pass_rate = base.distribution(kind="beta", mean=0.45, cv=0.6)
    c.simulate.sessions.task_cv = 0.2
    c.simulate.sessions.prompt_tokens = base.distribution(kind="lognormal", mean=3000.0, cv=0.3)
    c.simulate.sessions.turns = base.distribution(kind="gamma", mean=20.0, cv=0.3)
    c.simulate.sessions.response_tokens = base.distribution(kind="lognormal", mean=500.0, cv=1.0)
    c.simulate.sessions.tool_tokens = base.distribution(kind="lognormal", mean=270.0, cv=1.0)
    c.simulate.sessions.tool_seconds = base.distribution(kind="gamma", mean=75.0, cv=1.0)
    c.simulate.sessions.grade_seconds = base.distribution(kind="gamma", mean=60.0, cv=0.5)
    c.simulate.trainer.update_seconds = 480.0
    c.simulate.trainer.publish_seconds = 20.0
    c.simulate.trainer.other_seconds = 10.0
    return c
