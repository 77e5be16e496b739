"""The published transfer of a 1.7B proxy onto Qwen3-8B (arXiv 2607.11505), on the hardware that it needs.

rlx signal create --base=models/qwen3-1.7b --expert=runs/qwen3_17b_rl/model --to=signals/qwen3_17b
rlx train --config=configs/popd_qwen3_17b_to_8b.py --config.tasks.sources.math.path=math.jsonl

Non-thinking, rewards 0 and 1, 256 prompts x 8 samples, LR 1e-6, T = 1, at most 70 updates, mean@8 on held-out tasks.
Published: the target alone 17.3 (mean@16 over 8 sets of mathematics), lambda 1.0 27.5, 1.25 34.2, 1.5 37.2, 1.75 35.7,
2.0 33.6, and 0.5 collapses to 0; the best lambda fitted to these is 1.57.

The trainer takes eight GPUs (`rlx plan`), the eight servers one each.
"""

from ml_collections import ConfigDict

from configs import base

LAM = 1.57


def get_config() -> ConfigDict:
    c = base.get_config()
    c.run.name = "popd_qwen3_17b_to_8b"
    c.model.path = "models/qwen3-8b"
    c.model.dtype = "bfloat16"
    c.chat.thinking = "off"
    c.lora.rank = 0
    c.tasks.sources.math = base.source(path="math.jsonl", grader="math_verify", size=0)
    c.tasks.suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    c.rollout.tasks_per_update = 256
    c.rollout.group_size = 8
    c.rollout.max_new_tokens = 4096
    c.rollout.temperature = 1.0
    c.rollout.filter_no_signal = False
    c.engine.kind = "sglang"
    c.engine.context = 5120
    c.inference.count = 8
    c.learner.updates = 70
    c.learner.learning_rate = 1e-6
    c.learner.row_tokens = 8192
    c.learner.micro_batch_rows = 4
    c.cluster.trainer_layout = "TP2 DP4"
    c.objective.loss = "reinforce"
    c.objective.centering = "off"
    c.objective.distill.form = "sampled"
    c.objective.distill.signal = "proxy"
    c.objective.distill.alpha = 1.0
    c.objective.distill.lam = LAM
    c.frozen.signals = ("signals/qwen3_17b",)
    c.collapse.reward_drop = 0.1
    c.collapse.entropy_growth = 5.0
    c.collapse.repetition = 0.5
    c.collapse.length_factor = 4.0
    c.eval.every = 10
    c.eval.attempts_per_task = 8
    c.eval.k = (1, 8)
    c.checkpoint.every = 10
    c.checkpoint.keep = 2
    return c
