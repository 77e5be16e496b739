"""The target of a proxy study: Kimi K3.1 Pro, 2.78T parameters, on agentic coding tasks; 7 nodes of 8 B200s.

rlx plan --config=configs/k31_target.py
rlx simulate --config=configs/k31_target.py
rlx diff configs/k31_target.py configs/qwen36_35b_proxy.py

40 updates took about 20 hours. Three nodes train (TP4 PP3 CP2 DP1, EP8), four generate: 2 engines of 16 GPUs (TP16,
EP16, attention DP2). Thinking is on, at low effort. K3.1 is post-trained K3: its architecture is K3's.

Its adapter has 24.5B parameters, 0.88 % of the model. Factors of their own for each expert would make it 53B; with the
outer ones shared by a layer's experts (`lora.experts`) the routed experts have 24.3B, attention's q, k, v and o 0.2B.
"""

from ml_collections import ConfigDict

from configs import simulate_target


def get_config() -> ConfigDict:
    c = simulate_target.get_config()  # sessions, engines and the trainer's seconds, as far as they are known
    c.run.name = "k31_target"
    c.model.path = "configs/architectures/kimi_k3"
    c.model.dtype = "bfloat16"
    c.model.remat = "layer"
    c.chat.thinking = "low"
    c.cluster.trainer_nodes = 3
    c.cluster.inference_nodes = 4
    c.cluster.trainer_layout = "TP4 PP3 CP2 DP1 EP8"
    c.plan.device = "B200"
    c.plan.sequence_tokens = 18_000
    c.cluster.engines = 2
    c.cluster.engine_layout = "TP16 EP16 DP2"  # attention DP 2
    c.lora.rank = 32
    c.lora.alpha = 32.0
    c.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "experts.*")
    c.lora.experts = "shared_outer"

    c.tasks.train = 22  # edge tasks of 20 projects
    c.tasks.held_out = 12  # projects that training never sees
    c.engine.kind = "sglang"
    c.inference.addresses = ("http://engine-0:30000", "http://engine-1:30000")
    c.inference.tensor_parallel = 16
    c.inference.arguments = ("--ep-size=16", "--dp-size=2", "--enable-dp-attention")
    c.inference.weights = "full"  # as adapters engines are sent dense layers alone, not routed experts

    c.learner.learning_rate = 5e-5
    c.learner.micro_batch_rows = 6  # one after the other through the pipeline
    c.learner.prefix_sharing = False  # KDA layers carry a state
    c.objective.advantage = "group_mean"
    c.objective.loss = "tis"
    c.objective.tis_cap = 2.0
    c.objective.centering = "tis"
    c.objective.aggregation = "token_mean"
    c.rollout.head_size = 128
    c.eval.every = 10
    c.eval.attempts_per_task = 8
    return c
