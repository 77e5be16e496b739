"""The quickstart with SGLang servers as engines: RL of SmolLM2-135M-Instruct on sums, on CPU cores or on GPUs.

make .venv-sglang model
rlx train --config=configs/quickstart_sglang.py             LoRA, merged, from a shared directory; one after the other
rlx train --config=configs/quickstart_sglang.py:full        every parameter
rlx train --config=configs/quickstart_sglang.py:overlapped  generation beside training, two servers, weights over HTTP
rlx train --config=configs/quickstart_sglang.py --config.inference.device=cuda     on a GPU machine: docs/sglang.md
"""

from ml_collections import ConfigDict

from configs import quickstart

VARIANTS = ("", "full", "overlapped")


def get_config(variant: str = "") -> ConfigDict:
    c = quickstart.get_config()
    c.run.name = f"quickstart_sglang_{variant}" if variant else "quickstart_sglang"
    c.engine.kind = "sglang"
    c.inference.count = 1
    c.inference.device = "cpu"
    c.inference.radix_cache = "on"  # eight samples of a prompt, all of which begin with the same instructions
    c.inference.distributed_backend = "gloo"
    c.producer.engine_admission = 128  # a collection at once: on a CPU each prefill in between costs a step of all
    c.inference.health_timeout_s = 120.0  # a step of a full batch may take a busy CPU half a minute
    if variant == "full":
        c.lora.rank = 0
        c.learner.learning_rate = 2e-5
    if variant == "overlapped":
        c.inference.count = 2
        c.inference.transport = "tensor"
        c.producer.max_policy_lag = 2
        c.producer.sessions_in_flight = 256
        c.audit.every = 8
    return c
