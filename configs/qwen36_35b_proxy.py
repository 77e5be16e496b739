"""A proxy for `k31_target`: Qwen3.6-35B-A3B on the same kind of tasks, on 3 nodes of 8 GPUs (final) or 2 (first try).

rlx plan --config=configs/qwen36_35b_proxy.py:final
rlx diff configs/k31_target.py configs/qwen36_35b_proxy.py:final
rlx simulate --config=configs/qwen36_35b_proxy.py:first_try

First try: DP8 on one node, 8 engines of one GPU on the other, the target's 22 tasks; training saw no sample above
32,768 tokens, and the lag grew to 8. Final: CP2 DP4, 16 engines, 24 edge tasks of its own, and sessions that are given
no further turn from 61,440 tokens on, so that what is written is also trained. Thinking is off in both; the learning
rate is swept (first try 5e-5 ... 2e-4, final 3e-5 ... 4e-4). The adapter has 36.4M parameters, 0.10 % of the model.
"""

from ml_collections import ConfigDict

from configs import k31_target

VARIANTS = ("first_try", "final")


def get_config(variant: str = "final") -> ConfigDict:
    c = k31_target.get_config()
    c.run.name = f"qwen36_35b_proxy_{variant}"
    c.model.path = "configs/architectures/qwen3_6_35b_a3b"
    c.lora.targets = ("self_attn.*", "linear_attn.*")
    c.lora.experts = "per_expert"  # no routed expert is adapted
    c.chat.thinking = "off"
    c.inference.tensor_parallel = 1
    c.inference.arguments = ()
    first = variant == "first_try"
    engines = 8 if first else 16
    c.inference.addresses = tuple(f"http://engine-{i}:30000" for i in range(engines))
    c.simulate.engines.count = engines
    c.cluster.trainer_nodes = 1
    c.cluster.inference_nodes = 1 if first else 2
    c.cluster.trainer_layout = "TP1 PP1 CP1 DP8" if first else "TP1 PP1 CP2 DP4"
    c.learner.micro_batch_rows = 8 if first else 4  # a row for each of DP
    c.cluster.engines = engines
    c.cluster.engine_layout = ""
    c.producer.sessions_in_flight = 256 if first else 192
    c.producer.max_policy_lag = 8 if first else 4
    c.producer.train_token_limit = 32_768 if first else 65_536
    c.producer.session_token_limit = 0 if first else 61_440
    c.rollout.max_new_tokens = 8192 if first else 4096  # of one turn: the last one has to fit behind the stop
    c.tasks.train = 22 if first else 24
    c.tasks.held_out = 12 if first else 10  # final: 5 of new projects, 5 like the trained ones
    c.eval.every = 0  # `rlx evaluate --watch`, a job of its own
    c.eval.watch_nth = 1 if first else 5
    return c
