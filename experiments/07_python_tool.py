# %% [markdown]
# # Tool use in two turns, learned by RL
#
# "What is 48 * 73?" is more than a model of 0.2M parameters can do in its head, and little for a Python program. The
# model is cold-started on examples that show a program and what it prints, a program with a digit miscopied, and a
# guess; then it is trained on nothing but whether its last word is right. What is learned: to run a program instead of
# guessing, to copy the question into it, and to say what it printed.
#
# Programs run in sandboxes (`make system-deps`; docs/sandboxes.md). Ten minutes on two cores, `RLX_SMOKE=1` takes fewer
# steps. Everything goes to `runs/python_tool`.

# %%
import json
import os
from collections import Counter
from pathlib import Path

from experiments.python_tool import models
from experiments.shared.commands import rlx

SMOKE = bool(os.environ.get("RLX_SMOKE"))
HOME = Path("runs/python_tool")
RECIPE = "experiments/python_tool/recipe.py"

# %% [markdown]
# ## The tasks, the examples, and a model without any knowledge

# %%
models.write_tasks(HOME / "tasks.jsonl")
models.write_examples(HOME / "examples.jsonl")
print(f"{models.write_random_model(HOME / 'random', HOME / 'examples.jsonl'):,} parameters")
for line in (HOME / "examples.jsonl").read_text().splitlines()[:6]:
    print(json.loads(line)["turns"])

# %% [markdown]
# ## The cold start
#
# Examples of several turns are rendered as the environment's sessions are: the loss is on what the policy writes, not
# on what programs print.

# %%
rlx("sft", f"--config={RECIPE}:base", *(["--config.sft.steps=20"] if SMOKE else []))

# %% [markdown]
# ## Training

# %%
few = ["--config.learner.updates=2", "--config.tasks.held_out=20", "--config.eval.attempts_per_task=2"]
rlx("train", f"--config={RECIPE}", *(few if SMOKE else []))
summary = json.loads((HOME / "trained" / "summary.json").read_text())
for label in ("before", "after"):
    low, high = summary[f"eval/interval_{label}"]
    print(f"held-out pass rate {label}: {summary[f'eval/pass_rate_{label}']:.3f} [{low:.3f}, {high:.3f}]")

# %% [markdown]
# ## What it does now
#
# How its evaluated sessions went, before and after: with a program or without, right or wrong.

# %%
with (HOME / "trained" / "samples.jsonl").open() as file:
    evaluated = [record for record in map(json.loads, file) if record["phase"] == "eval"]
for label in dict.fromkeys(record["label"] for record in evaluated):
    of_label = [record for record in evaluated if record["label"] == label]
    kinds = Counter(("a program" if "[1]" in r["response"] else "a guess", r["reward"] == 1) for r in of_label)
    print(label, {f"{kind}, {'right' if right else 'wrong'}": n for (kind, right), n in sorted(kinds.items())})
print(evaluated[-1]["question"], repr(evaluated[-1]["response"]))
