# %% [markdown]
# # Proxy OPD: what RL taught a small model moves onto a larger one
#
# RL on a large target is dear. Proxy OPD (arXiv 2607.11505) does the exploring on a small *proxy*, and moves what the
# proxy learned, log expert - log base, onto the target, which trains on its own rollouts:
#
#     u = alpha (log expert - log base) - lambda (log pi - log pi_ref)
#
# The optimum is pi_ref (expert / base)^(alpha / lambda): the target keeps what it knows and adds what was learned.
# Plain on-policy distillation makes the target like the expert, which is no gain where the target is better already.
#
# First a table, on which the optimum can be seen; then the whole procedure with commands, on models of 0.02M to 0.8M
# parameters that are made on the spot. Some ten minutes on two cores; `RLX_SMOKE=1` takes fewer steps. Everything goes
# to `runs/popd_tour`, or below the directory that `RLX_POPD` names.

# %%
import functools
import json
import os
from pathlib import Path

import numpy as np

from experiments.popd import models
from experiments.shared import commands

SMOKE = bool(os.environ.get("RLX_SMOKE"))
RUNS = Path(os.environ.get("RLX_POPD", ".")) / "runs" / "popd_tour"
SFT_STEPS = {"small": 600, "target": 150} if SMOKE else {"small": 800, "target": 800}
EXPERT_UPDATES, UPDATES = (6, 2) if SMOKE else (24, 20)

# %% [markdown]
# ## The optimum on a table
#
# One state, six tokens. The proxy's base prefers a wrong token, its expert has learned to prefer token 2; the target
# knows better than both which tokens are out of the question. Small lambda trusts the proxy's lesson more than it is
# worth: at 0.05 the policy is a point.

# %%
base = np.array([0.40, 0.30, 0.20, 0.05, 0.03, 0.02])
expert = np.array([0.22, 0.20, 0.50, 0.05, 0.02, 0.01])
target = np.array([0.10, 0.50, 0.38, 0.015, 0.004, 0.001])


def optimum(lam):
    weights = target * (expert / base) ** (1 / lam)
    return weights / weights.sum()


print("target      ", target.round(3))
print("the expert  ", expert, "  what plain distillation leads to")
for lam in (2.0, 1.0, 0.5, 0.05):
    print(f"lambda {lam:<5}", optimum(lam).round(3))

# %% [markdown]
# ## Models
#
# A question is five digits, the answer the same digits sorted. The bases come from supervised steps on answers with
# wrong digits in them, more for the proxy than for the target.


# %%
rlx = functools.partial(commands.rlx, lines=6, characters=1800)


def recipe(name, **changes):
    """A recipe with this script's directories."""
    fixed = {"run.directory": RUNS, "tasks.sources.digits.path": RUNS / "tasks.jsonl", **changes}
    return [f"--config={name}", *(f"--config.{key}={value}" for key, value in fixed.items())]


def base_of(name):
    return RUNS / f"{name}_base" / "sft"


models.write_tasks(RUNS)
for name in ("small", "target"):
    count = models.write_random_model(RUNS / f"{name}_random", name)
    print(f"{name}: {count:,} parameters")
    if not base_of(name).exists():
        files = {"model.path": RUNS / f"{name}_random", "sft.path": RUNS / f"examples_{name}.jsonl"}
        rlx("sft", *recipe(f"experiments/popd/recipe.py:{name}_base", **files, **{"sft.steps": SFT_STEPS[name]}))

# %% [markdown]
# ## The proxy learns
#
# Ordinary RL, on the small model.

# %%
own = {"model.path": base_of("small"), "learner.updates": EXPERT_UPDATES, "run.name": "expert"}
rlx("train", *recipe("experiments/popd/recipe.py:small", **own))

# %% [markdown]
# ## The signal
#
# An artefact: base and expert by content, tokenizer, where it came from and what it cost. `verify` looks at states that
# the target visits: how large the signal is there, how many tokens carry it, and how often it agrees with the reward.

# %%
signal = RUNS / "signals" / "small"
if not (signal / "signal.json").exists():
    rlx("signal", "create", f"--run={RUNS / 'expert'}", f"--to={signal}")
rlx("signal", "list", RUNS / "signals")
target_model = {"model.path": base_of("target")}
rlx("signal", "verify", signal, *recipe("configs/popd.py", **target_model), "--tasks=16")

# %% [markdown]
# An edited file is refused.

# %%
edited = RUNS / "edited" / "signal.json"
edited.parent.mkdir(exist_ok=True)
edited.write_text((signal / "signal.json").read_text().replace('"alpha": 1.0', '"alpha": 2.0'))
refused = rlx("signal", "verify", edited.parent, check=False)
print(refused.stderr.strip())

# %% [markdown]
# ## The transfer, beside plain distillation and direct RL
#
# Equal budgets: the same target, tasks, samples, updates and learning rate.

# %%
weights = {"learner.updates": UPDATES, **target_model}
rlx("train", *recipe("configs/popd.py", **weights, **{"frozen.signals": (str(signal),), "run.name": "popd"}))
rlx(
    "train",
    *recipe("configs/opd.py", **weights, **{"frozen.teachers": (str(RUNS / "expert/model"),), "run.name": "opd"}),
)
rlx("train", *recipe("configs/rl.py", **weights, **{"run.name": "rl"}))
for name in ("expert", "popd", "opd", "rl"):
    found = json.loads((RUNS / name / "summary.json").read_text())
    print(f"{name:>7}: {found['eval/pass_rate_before']:.3f} -> {found['eval/pass_rate_after']:.3f}")

# %% [markdown]
# ## A chain
#
# A trained target is the expert of the next signal. docs/popd_study.md has the figures of three seeds, all lambdas, two
# hops, and what did not come out.

# %%
if not (RUNS / "signals" / "next" / "signal.json").exists():
    rlx("signal", "create", f"--run={RUNS / 'popd'}", f"--to={RUNS / 'signals' / 'next'}")
rlx("signal", "show", RUNS / "signals" / "next")
