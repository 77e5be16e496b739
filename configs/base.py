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
    entry.environment = ""  # "" = one question, one answer | python_tool: programs may be run first, docs/sessions.md
    # | code: functions with hidden tests (human_eval, functions), docs/sandboxes.md
    # | web_project: small sites, built step by step (web_projects) | agent: a program that asks an OpenAI-compatible
    # endpoint and prints its answer, docs/agents.md
    entry.agent = ()  # of environment "agent": the command, such as ("python", "my_agent.py")
    entry.partial_credit = False  # rewards between 0 and 1 where the grader has them; False: 0 or 1
    entry.update(changes)
    return entry


def distribution(**changes) -> ConfigDict:
    """A length, a duration or a pass rate of `simulate.sessions`."""
    spread = ConfigDict()
    spread.kind = "constant"  # constant (the mean) | lognormal | gamma | beta (in [0, 1]), by mean and cv | quantiles
    spread.mean = 0.0
    spread.cv = 0.0  # coefficient of variation: standard deviation / mean
    spread.quantiles = ()  # values at evenly spaced probabilities, from the smallest to the largest, interpolated
    spread.update(changes)
    return spread


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
    c.model.remat = "auto"  # none | products | layer: the backward pass recomputes nothing | all but matrix products
    #                         and attention | whole layers; auto = products where they fit in 2 GiB, else layer
    c.model.scan_layers = "auto"  # on: a loop over the update's layers | off: all in one program, faster by a tenth and
    #                               compiled in proportion to their number; auto = off up to 8 layers
    c.model.attention_block = 0  # tokens: the update's attention scores exist for so many queries and keys at once, so
    #                              that memory is linear in the row; 0 = whole rows up to 1,024 tokens, else 1,024; on
    #                              a CPU up to 512, else 256
    c.model.balance_loss = 0.0  # mixtures of experts: coefficient of the loss that evens their load out, 0 in RL
    c.model.router_z_loss = 0.0  # mixtures of experts: coefficient of the loss that keeps router logits small, 0 in RL
    c.model.balance_packing = False  # mixtures of experts: rows ordered so that micro-batches spread over experts, by
    #                                  the choices that replay_routes records
    c.model.replay_routes = False  # mixtures of experts: train with the experts that the engine chose for each token

    c.lora = ConfigDict()
    c.lora.rank = 16  # 0 = train every parameter
    c.lora.alpha = 32.0  # the update is scaled by alpha / rank
    # Linear layers by name or by pattern: "mlp.*", "shared_expert.*", "in_proj_*"; routed experts only by patterns that
    # say so: "experts.*".
    c.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    # Of routed experts: factors of their own for each expert, or the outer ones, at the layer's width, shared by all.
    c.lora.experts = "per_expert"  # per_expert | shared_outer

    c.tasks = ConfigDict()
    c.tasks.sources = ConfigDict()  # name -> source(...)
    c.tasks.seed = 0  # of generation, the split and the shuffle
    c.tasks.held_out = 200  # tasks kept for evaluation, never trained on
    c.tasks.train = 0  # tasks trained on, chosen by tasks.seed, 0 = all that are not held out
    c.tasks.split = ""  # edge.json of `rlx edge`: its tasks are trained on and held out, in place of held_out and train
    c.tasks.system_prompt = ""  # "" = none
    c.tasks.suffix = ""  # appended to every question

    c.chat = ConfigDict()
    c.chat.template = "checkpoint"  # checkpoint (its own) | chatml (ours, which keeps earlier thinking)
    c.chat.thinking = "off"  # off (an empty think block) | low | high | max, where the template has it

    c.tools = ConfigDict()  # sources with an environment: docs/sessions.md
    c.tools.format = "hermes"  # hermes (<tool_call>{json}</tool_call>) | plain (a fenced block named as the tool)
    c.tools.max_turns = 8  # responses of a session
    c.tools.call_seconds = 10.0  # of one tool call
    c.tools.session_seconds = 120.0  # of all tool calls of a session
    c.tools.output_bytes = 4096  # of a call's output that the policy is shown

    c.grader = ConfigDict()
    c.grader.workers = 2  # processes
    c.grader.timeout_s = 10.0  # seconds a grading may take before its worker is killed
    c.grader.extract = "last_number"  # last_number | tagged (<answer>...</answer>) | all (the whole response)

    c.sandbox = ConfigDict()
    c.sandbox.kind = "bubblewrap"  # bubblewrap | subprocess (NO isolation) | daytona (a service of its API)
    c.sandbox.max_open = 256  # workspaces at once; sessions beyond them wait
    c.sandbox.max_running = 0  # commands at once, 0 = two for each core
    c.sandbox.directory = ""  # where workspaces are made, "" = the system's temporary directory
    c.sandbox.read_only = ()  # directories of this machine that programs see, beside /usr
    c.sandbox.url = ""  # of the service, such as https://app.daytona.io/api
    c.sandbox.api_key = "DAYTONA_API_KEY"  # the environment variable that has its key
    c.sandbox.limits = ConfigDict()  # of one command; disk_bytes and files are the workspace's
    c.sandbox.limits.wall_s = 30.0  # seconds
    c.sandbox.limits.cpu_s = 30.0  # seconds, of all its processes together
    c.sandbox.limits.cores = 1.0  # CPUs used at once, where control groups exist
    c.sandbox.limits.memory_bytes = 512 * 2**20  # files in /tmp included; without control groups of each process
    c.sandbox.limits.processes = 64  # threads count
    c.sandbox.limits.file_bytes = 64 * 2**20  # a single file
    c.sandbox.limits.disk_bytes = 256 * 2**20
    c.sandbox.limits.files = 10_000
    c.sandbox.limits.output_bytes = 2**20  # stdout and stderr together

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

    c.producer = ConfigDict()
    c.producer.max_policy_lag = 0  # updates between a token and its training; 0 = one after the other, 6 = overlap
    c.producer.publication = "refresh"  # barrier | refresh | drain: how engines get new weights, docs/async.md
    c.producer.sessions_in_flight = 96  # open sessions
    c.producer.engine_admission = 0  # requests that an engine runs at once, 0 = engine.slots, of sglang the profile's
    c.producer.http_admission = 0  # requests sent to an engine and not yet answered, 0 = 2 x its admission
    c.producer.max_concurrent_samples = 0  # submitted and not yet graded; 0 = max(a collection, 2 x the fleet's slots)
    c.producer.session_token_limit = 0  # tokens from which a session is given no further turn, 0 = none
    c.producer.train_token_limit = 0  # tokens of the longest sample that is trained, 0 = learner.row_tokens
    c.producer.over_limit = "drop"  # drop | cut: samples longer than train_token_limit
    c.producer.sessions_beyond_training = False  # let session_token_limit be above train_token_limit
    c.producer.stale_tasks = "return"  # return | drop: tasks of groups that became older than max_policy_lag
    c.producer.request_timeout_s = 1800.0  # seconds from a request to its answer, then the engine is ejected
    c.producer.environment_timeout_s = 600.0  # seconds of one call of an environment: reset, step, grading
    c.producer.load_timeout_s = 600.0  # seconds in which an engine must have loaded new weights
    c.producer.retries = 3  # times that a response, a sample or a grading is tried again
    c.producer.backoff_s = 1.0  # seconds before the first retry, or repair of an engine; doubles with each
    c.producer.outage_s = 300.0  # seconds without any engine that end the run
    c.producer.failure_limit = 64  # samples in a row that failed for good that end the run

    c.engine = ConfigDict()
    c.engine.kind = "local"  # local: the embedded engine | sglang: SGLang servers, section `inference`
    c.engine.slots = 64  # local: responses decoded at once
    c.engine.context = 256  # tokens, prompt and response
    c.engine.prefill_buckets = (32, 64, 128, 256)  # local: prompt lengths, tokens, that prefill is compiled for
    c.engine.prefill_rows = 8  # local: prompts prefilled at once
    c.engine.steps_per_dispatch = 8  # local: tokens decoded between two looks of the host
    c.engine.lanes = 1  # local, on a CPU: threads with an equal share of the slots each, for models of a few million
    #                     parameters (docs/measurements.md); a request stays in one, so groups should fit into a share

    c.inference = ConfigDict()  # engine.kind = "sglang": docs/sglang.md
    c.inference.profile = "generic"  # | colocated | olmo_h100 | olmo35_b300: admission, HTTP admission, radix cache
    c.inference.addresses = ()  # of servers that run, ("http://HOST:PORT", ...)
    c.inference.router = ""  # address in front of them, "" = none; requests go there, weights to each of addresses
    c.inference.count = 0  # servers to start on this machine, in place of addresses
    c.inference.host = "127.0.0.1"  # that they listen on; 0.0.0.0: all of the machine's
    c.inference.first_port = 0  # the others follow it; 0 = free ports
    c.inference.python = ".venv-sglang/bin/python"  # of the environment that has SGLang
    c.inference.api_key_variable = ""  # environment variable with the key for generation, "" = none
    c.inference.admin_key_variable = ""  # the same for weights and pauses, "" = the former
    c.inference.ready_timeout_s = 600.0  # seconds in which a server must have started
    c.inference.health_every_s = 10.0  # seconds between two looks at each server, not while it loads weights
    c.inference.health_timeout_s = 30.0  # seconds without an answer, then the engine is ejected
    c.inference.device = "cuda"  # cuda | cpu
    c.inference.first_gpu = 0  # of the servers started here; each takes the next tensor_parallel
    c.inference.tensor_parallel = 1  # GPUs of a server
    c.inference.memory_fraction = 0.0  # of a GPU's memory, for weights and cache; 0 = SGLang's own choice
    c.inference.attention_backend = ""  # "" = SGLang's own choice; torch_native on a CPU
    c.inference.radix_cache = "auto"  # auto (the profile's) | on | off: prefixes are kept between requests
    c.inference.state_dtype = "float32"  # of linear attention's state; hybrid models with a radix cache need float32
    c.inference.fp32_head = False  # the engine's output head in float32, as the trainer's
    c.inference.max_lora_rank = 64  # weights = "adapter": room that engines keep
    c.inference.max_loras = 2  # weights = "adapter": versions that a batch may hold
    c.inference.arguments = ()  # further ones of sglang.launch_server, ("--nnodes=2", ...)
    c.inference.weights = "full"  # full (an adapter is merged in) | adapter: sent as LoRA, a name per version
    c.inference.transport = "disk"  # disk (a file system that all share) | tensor (HTTP) | distributed
    c.inference.weights_directory = ""  # of versions; "" = weights/ in the run's own directory
    c.inference.bucket_mib = 256  # MiB sent at once
    c.inference.distributed_backend = "nccl"  # nccl | gloo

    c.audit = ConfigDict()
    c.audit.at_start = False  # reset each server's weights, load them, compare
    c.audit.every = 0  # publications between two audits, 0 = none

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
    c.learner.prefix_sharing = True  # compute a prompt once for all samples of its group in a row
    c.learner.row_samples = 0  # samples of a group in a row, each in a place of its own, so that attention has no
    #                            scores between them and a sample's exist whole; 0 = any parts side by side. Pays for
    #                            short samples of about one length, which are no shorter than their prompt
    c.learner.row_prefix = 0  # tokens of such a row for the prompt; its samples share the rest among them
    c.learner.nonfinite_limit = 3  # skipped updates in a row that stop the run
    c.learner.logprob_implementation = "auto"  # auto | reference | xla | mosaic
    c.learner.head_precision = "auto"  # auto (by dtype) | bfloat16 | bfloat16_3x | tensorfloat32 (GPU) | float32

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
    c.objective.distill.alpha = 1.0  # of the signal, beside the signal's own
    c.objective.distill.lam = 1.5  # of the absorbed update; 1.08 (4B to 8B) and 1.57 (1.7B to 8B) are published
    c.objective.distill.calibration = "constant"  # constant | entropy | overlap: lam / max(x, floor), x in [0, 1]
    c.objective.distill.calibration_floor = 0.2  # of x
    c.objective.distill.filter = "all"  # all | rewarded (OPD-FT) | agreeing (OPD-URM)
    c.objective.distill.combine = "weights"  # weights | vote: several signals into one
    c.objective.distill.weights = (1.0,)  # one a signal: of frozen.teachers or frozen.signals

    c.frozen = ConfigDict()  # policies that score samples beside the one that is trained: docs/popd.md
    c.frozen.teachers = ()  # distill.signal = "teacher": Hugging Face directories or PEFT adapters, one a weight
    c.frozen.signals = ()  # distill.signal = "proxy": directories made by `rlx signal create`, one a weight
    c.frozen.cache = ""  # file of scores by content, so that the same samples are scored once; "" = none

    c.collapse = ConfigDict()  # bounds that stop a run, 0 = off
    c.collapse.reward_drop = 0.0  # of the held-out pass rate, below that before the first update; needs eval.every
    c.collapse.entropy_low = 0.0  # nats, of the policy
    c.collapse.entropy_growth = 0.0  # times the first update's entropy
    c.collapse.repetition = 0.0  # share of a response's 4-grams that it has had before
    c.collapse.length_factor = 0.0  # the first update's mean length, times or divided by this
    c.collapse.patience = 2  # updates in a row; a drop of the held-out pass rate stops at once

    c.sft = ConfigDict()
    c.sft.steps = 0  # optimizer steps before RL, 0 = none
    c.sft.path = ""  # JSONL of {"question", "response"}
    c.sft.learning_rate = 1e-4
    c.sft.batch_size = 32  # examples of a step
    c.sft.batch_rows = 0  # rows that a step fills with as many examples as they hold, in place of batch_size; 0 = off
    c.sft.validation_path = ""  # JSONL like path, for the validation loss, or
    c.sft.validation_fraction = 0.0  # of path's questions, kept out of training for it; 0 and no path = no validation
    c.sft.eval_every = 25  # steps between two validation losses
    c.sft.save_every = 100  # steps between two checkpoints of `rlx sft`

    c.eval = ConfigDict()
    c.eval.every = 0  # updates between evaluations, 0 = only before and after
    c.eval.attempts_per_task = 2
    c.eval.watch_nth = 1  # saved versions between two that `rlx evaluate --watch` tests
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

    c.cluster = ConfigDict()  # what the trainer runs on; engines elsewhere are planned here, and given as addresses
    c.cluster.trainer_nodes = 1  # one process each; above 1 see docs/multi-node.md
    c.cluster.inference_nodes = 0  # 0 = the engines are on the trainer's
    c.cluster.gpus_per_node = 8  # devices of each process, where there are several
    c.cluster.trainer_layout = ""  # "TP4 PP3 CP2 DP1 EP8": 24 devices, EP lies in the others; "" = one
    c.cluster.pipeline_rounds = 1  # blocks of layers a stage of PP; above 1 = circular: less waiting, weights move
    c.cluster.context_parallel = "gather"  # gather | ring: keys and values of a row are gathered over cp | go round it,
    #                                        so that a device has those of its own tokens and as many under way
    c.cluster.sequence_parallel = True  # between layers' products each device of a TP group has a part of the tokens
    c.cluster.engines = 0  # 0 = as engine.kind and inference.count say
    c.cluster.engine_layout = ""  # of one engine, "TP16 EP16 DP2", "" = one GPU

    c.plan = ConfigDict()  # `rlx plan` alone reads it
    c.plan.device = "H200"  # H100 | H200 | B200 | B300: of trainer and engines
    c.plan.sequence_tokens = 0  # mean of a trained sequence, prompt included; 0 = learner.row_tokens
    c.plan.efficiency = 0.5  # share of a device's peak FLOP/s that its matrix products reach

    c.simulate = ConfigDict()  # `rlx simulate` alone reads it; tokens and seconds
    c.simulate.token_grain = 1  # tokens that one simulated token stands for: more is faster, and rounds lengths
    c.simulate.engines = ConfigDict()
    c.simulate.engines.count = 1
    c.simulate.engines.start_seconds = 0.0  # before the first request
    c.simulate.engines.step_seconds = 0.02  # of a decoding step: a token for each of n running requests takes this
    c.simulate.engines.step_seconds_per_request = 0.0002  # and n times this
    c.simulate.engines.request_seconds = 0.0  # that a request holds its slot beside prefill and decoding
    c.simulate.engines.prefill_tokens_per_s = 10_000.0  # decoding stands still meanwhile
    c.simulate.engines.prefix_cache = False  # True: a session's next turn prefills only what is new
    c.simulate.engines.load_seconds = 0.0  # to take over published weights
    c.simulate.sessions = ConfigDict()
    c.simulate.sessions.tasks = 1000  # different ones
    c.simulate.sessions.pass_rate = distribution(kind="beta", mean=0.5, cv=0.6)  # over tasks
    c.simulate.sessions.task_cv = 0.0  # of a factor on response lengths that all samples of a task share
    c.simulate.sessions.open_seconds = distribution()  # before the first request, as a sandbox starts
    c.simulate.sessions.prompt_tokens = distribution(mean=64.0)
    c.simulate.sessions.turns = distribution(mean=1.0)  # responses; a tool answers between each two
    c.simulate.sessions.response_tokens = distribution(kind="lognormal", mean=32.0, cv=0.5)  # of one turn
    c.simulate.sessions.tool_tokens = distribution()
    c.simulate.sessions.tool_seconds = distribution()
    c.simulate.sessions.close_seconds = distribution()  # after the last response, before the grading
    c.simulate.sessions.grade_seconds = distribution()  # config.grader.workers grade at once
    c.simulate.trainer = ConfigDict()
    c.simulate.trainer.update_seconds = 1.0  # of an update
    c.simulate.trainer.seconds_per_token = 0.0  # and this for each token of its batch
    c.simulate.trainer.publish_seconds = 0.0  # to send weights out, before the engines load them
    c.simulate.trainer.other_seconds = 0.0  # between publication and the next batch: metrics, checkpoints
    c.simulate.trainer.engine_slowdown = 1.0  # factor on the engines' seconds while training; 1 = separate devices
    c.simulate.trainer.own_slowdown = 1.0  # factor on the seconds of an update while engines run; 1 = separate devices
    c.simulate.faults = ConfigDict()
    c.simulate.faults.engine_failures_per_hour = 0.0  # of one engine
    c.simulate.faults.engine_down_seconds = 300.0  # until it is back
    c.simulate.faults.failed_gradings = 0.0  # fraction
    return c
