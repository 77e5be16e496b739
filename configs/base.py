"""Every key of a run, its unit and its default. Recipes start from `get_config()` and change what they need.

rlx train --config=configs/base.py --config.model.path=models/my-model
"""

from ml_collections import ConfigDict


def source(**changes) -> ConfigDict:
    """One entry of `tasks.sources`."""
    entry = ConfigDict()
    entry.dataset = ""  # a reasoning-gym dataset name, or
    entry.path = ""  # a JSONL file of {"question", "answer", "grader"?}
    entry.options = ConfigDict()  # reasoning-gym's own keys of this dataset, such as max_terms
    entry.size = 2000  # tasks generated; a JSONL file is used whole (0 = whole)
    entry.weight = 1.0  # share of the mix, relative to the other sources
    entry.grader = ""  # "" = the dataset's own; else a name from rlx/envs/graders.py
    entry.update(changes)
    return entry


def get_config() -> ConfigDict:
    c = ConfigDict()

    c.run = ConfigDict()
    c.run.name = "run"  # the run's directory is <directory>/<name>
    c.run.directory = "runs"
    c.run.seed = 0  # of samples, adapters and the order of SFT examples; tasks have tasks.seed
    c.run.resume = "auto"  # auto: continue where a checkpoint exists | never: refuse a used directory | must
    c.run.compilation_cache = ".cache/jax"  # directory of XLA's persistent cache, "" = none

    c.model = ConfigDict()
    c.model.path = ""  # a Hugging Face directory: config.json, safetensors, tokenizer
    c.model.dtype = "float32"  # float32 | bfloat16: weights in memory and matrix products
    c.model.remat = "layer"  # none | layer: recompute activations in the backward pass

    c.lora = ConfigDict()
    c.lora.rank = 16  # 0 = train every parameter
    c.lora.alpha = 32.0  # the update is scaled by alpha / rank
    c.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj")

    c.tasks = ConfigDict()
    c.tasks.sources = ConfigDict()  # name -> source(...)
    c.tasks.seed = 0  # of generation, the split and the shuffle
    c.tasks.held_out = 200  # tasks kept for evaluation, never trained on
    c.tasks.system_prompt = ""  # "" = none
    c.tasks.suffix = ""  # appended to every question

    c.grader = ConfigDict()
    c.grader.workers = 2  # processes
    c.grader.timeout_s = 10.0  # seconds a grading may take before its worker is killed
    c.grader.extract = "last_number"  # last_number | tagged (<answer>...</answer>) | all (the whole response)

    c.rollout = ConfigDict()
    c.rollout.tasks_per_update = 8  # groups collected for an update
    c.rollout.group_size = 8  # samples of one task
    c.rollout.max_new_tokens = 64  # tokens
    c.rollout.temperature = 1.0
    c.rollout.top_p = 1.0  # 1 = off
    c.rollout.top_k = 0  # 0 = off
    c.rollout.min_p = 0.0  # 0 = off
    c.rollout.head_size = 128  # K likeliest tokens stored with every sampled token, 0 = none
    c.rollout.truncated = "score"  # score | mask | zero_reward: responses cut by max_new_tokens
    c.rollout.filter_no_signal = True  # do not train on groups whose rewards are all equal
    c.rollout.no_signal_limit = 20  # with the filter on: collections in a row without any signal that stop the run

    c.engine = ConfigDict()
    c.engine.kind = "local"  # local: the embedded engine
    c.engine.slots = 64  # responses decoded at once
    c.engine.context = 256  # tokens, prompt and response
    c.engine.prefill_buckets = (32, 64, 128, 256)  # prompt lengths, tokens, that prefill is compiled for
    c.engine.prefill_rows = 8  # prompts prefilled at once
    c.engine.steps_per_dispatch = 8  # tokens decoded between two looks of the host

    c.learner = ConfigDict()
    c.learner.updates = 100  # collections; one without any signal makes no optimizer update
    c.learner.learning_rate = 1e-4
    c.learner.schedule = "constant"  # constant | linear | cosine, after the warm-up; over the optimizer updates made
    c.learner.warmup_updates = 0
    c.learner.final_learning_rate_fraction = 0.0  # of learning_rate, where linear and cosine end
    c.learner.b1 = 0.9  # Adam
    c.learner.b2 = 0.999
    c.learner.eps = 1e-8
    c.learner.weight_decay = 0.0  # decoupled (AdamW)
    c.learner.max_grad_norm = 1.0  # global norm, 0 = no clipping
    c.learner.row_tokens = 256  # tokens of a packed row; no sample may be longer
    c.learner.row_targets = 0  # tokens of a row that the loss is on, 0 = row_tokens; the output head runs on these
    c.learner.micro_batch_rows = 4  # rows whose activations are held at once
    c.learner.nonfinite_limit = 3  # skipped updates in a row that stop the run
    c.learner.logprob_implementation = "auto"  # auto | reference | xla

    c.objective = ConfigDict()
    c.objective.advantage = "group_mean"  # group_mean | group_std | leave_one_out | batch_whitened | mean_normalised
    #                                       | none (the raw reward) | gae (per token, critic = the group's mean reward)
    c.objective.advantage_ddof = 1  # of group_std's and batch_whitened's deviation: 0 | 1
    c.objective.advantage_eps = 1e-6  # added to that deviation, reward
    c.objective.discount = 1.0  # gae: gamma, per token
    c.objective.gae_lambda = 0.95  # gae: lambda, per token
    c.objective.loss = "tis"  # reinforce | tis | icepop | ppo_clip | ppo_dual_clip | ppo_clip_tis | cispo | gspo
    #                          | dppo_tv; formulas in docs/algorithms.md
    c.objective.importance_level = "token"  # token | geometric | sum: tis and icepop by token or whole sequence
    c.objective.tis_cap = 2.0  # tis, ppo_clip_tis: C of min(ratio, C)
    c.objective.mask_low = 0.5  # icepop: tokens whose p/q is below carry no gradient
    c.objective.mask_high = 5.0  # icepop: the same above
    c.objective.clip_low = 0.2  # ppo_*, gspo: the ratio is clipped at 1 - clip_low
    c.objective.clip_high = 0.28  # ppo_*, gspo: and at 1 + clip_high; gspo's published bounds are 3e-4 and 4e-4
    c.objective.dual_clip = 3.0  # ppo_dual_clip: the ratio's cap where the advantage is negative
    c.objective.cispo_low = 0.0  # cispo: the weight's absolute lower bound
    c.objective.cispo_high = 5.0  # cispo: its absolute upper bound
    c.objective.tv_delta = 0.2  # dppo_tv: largest |p - q| of a token that is still pushed further
    c.objective.sequence_mask = "off"  # off | geometric | sum: drop whole sequences by this p/q ratio
    c.objective.sequence_mask_low = 0.5  # kept from this ratio
    c.objective.sequence_mask_high = 2.0  # to this
    c.objective.use_rollout_logprobs = False  # True: `old` of ppo_*, cispo and gspo is the sampler
    c.objective.centering = "tis"  # off | none | tis | mis: score centering, with the weight of reinforce, tis, icepop
    c.objective.aggregation = "token_mean"  # | sequence_mean_token_mean | sequence_mean_token_sum
    #                                         | sequence_mean_token_sum_norm
    c.objective.constant_length = 1024.0  # sequence_mean_token_sum_norm: tokens a sequence's sum is divided by
    c.objective.entropy_coefficient = 0.0  # of the entropy bonus, per nat
    c.objective.kl_coefficient = 0.0  # of the KL to the reference, per nat; 0 = none
    c.objective.kl_estimator = "k3"  # k1 | k2 | k3
    c.objective.kl_placement = "loss"  # loss | reward

    c.objective.distill = ConfigDict()
    c.objective.distill.form = "off"  # off | sampled | top_k | full: over which tokens the utility is summed
    c.objective.distill.signal = "proxy"  # teacher (OPD) | proxy (Proxy OPD)
    c.objective.distill.alpha = 1.0  # of the signal
    c.objective.distill.lam = 1.5  # of the absorbed update; 1.08 (4B to 8B) and 1.57 (1.7B to 8B) are published
    c.objective.distill.calibration = "constant"  # constant | entropy | overlap: lam / max(x, floor), x in [0, 1]
    c.objective.distill.calibration_floor = 0.2  # of x
    c.objective.distill.filter = "all"  # all | rewarded (OPD-FT) | agreeing (OPD-URM)
    c.objective.distill.combine = "weights"  # weights | vote: several signals into one
    c.objective.distill.weights = (1.0,)  # one a signal; a signal is one teacher or one pair of proxies

    c.sft = ConfigDict()
    c.sft.steps = 0  # optimizer steps before RL, 0 = none
    c.sft.path = ""  # JSONL of {"question", "response"}
    c.sft.learning_rate = 1e-4
    c.sft.batch_size = 32  # examples

    c.eval = ConfigDict()
    c.eval.every = 0  # updates between evaluations, 0 = only before and after
    c.eval.attempts_per_task = 2
    c.eval.temperature = 1.0
    c.eval.k = (1, 2)  # pass@k
    c.eval.confidence = 0.95  # of the Wilson interval

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # updates
    c.checkpoint.keep = 2  # newest checkpoints kept

    c.metrics = ConfigDict()
    c.metrics.tensorboard = True
    c.metrics.histograms_every = 5  # updates
    c.metrics.samples_every = 5  # updates
    c.metrics.samples_shown = 4
    c.metrics.skip_updates = 3  # updates left out of every rate: they hold compilation
    return c
