# %% [markdown]
# # A proxy, from setting it up to seeing whether its findings transfer
#
# A run on the target is too dear for ablations. A *proxy* is the cheapest model whose ranking of configurations agrees
# with the target's. The procedure has four steps, each a command with an artefact; here they are, in miniature, on
# models of 0.1M and 0.2M parameters that are made on the spot:
#
# 1. set the proxy up: what must change with the model (`rlx diff`), which tasks it sometimes passes (`rlx edge`),
# 2. reproduce on it what is known of the target: rewards rise (`rlx train`, `rlx evaluate --watch`, `rlx compare`),
# 3. run new experiments on it (`rlx sweep`),
# 4. see whether they transfer (`rlx agree`).
#
# Some ten minutes on two cores; `RLX_SMOKE=1` takes fewer seeds and updates. Everything goes to `runs/procedure` and
# `reports/procedure`, or below the directory that `RLX_PROCEDURE` names.

# %%
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from experiments.shared import commands
from experiments.study import models

SMOKE = bool(os.environ.get("RLX_SMOKE"))
HOME = Path(os.environ.get("RLX_PROCEDURE", "."))
RUNS, REPORTS = HOME / "runs" / "procedure", HOME / "reports" / "procedure"
RECIPE = "experiments/study/recipe.py"
SEEDS, UPDATES, SFT_STEPS = (2, 6, 250) if SMOKE else (3, 20, 600)
MODELS = {"target": "other", "proxy": "small"}  # two of the study's: of another family, and less than half the size


rlx = functools.partial(commands.rlx, lines=4, characters=1500)


def recipe(role, phase=""):
    """The study's recipe of a role's model, with this script's directories."""
    name = MODELS[role]
    start = RUNS / (f"{name}_random" if phase else f"{name}_base/sft")
    return [
        f"--config={RECIPE}:{name}{phase}",
        f"--config.run.directory={RUNS}",
        f"--config.model.path={start}",
        f"--config.tasks.sources.digits.path={RUNS}/tasks.jsonl",
        f"--config.learner.updates={UPDATES}",
    ]


# %% [markdown]
# ## Two base models
#
# Random weights and a supervised start on noisy answers: a model that knows the answer and often writes another.

# %%
models.write_tasks(RUNS)
for role, name in MODELS.items():
    count = models.write_random_model(RUNS / f"{name}_random", name)
    print(f"{role}: {count:,} parameters")
    sft = [f"--config.sft.path={RUNS}/examples.jsonl", f"--config.sft.steps={SFT_STEPS}"]
    rlx("sft", *recipe(role, "_base"), *sft)

# %% [markdown]
# ## Step 1: set the proxy up
#
# What differs between the two recipes, and of what kind it is. The large runs that the project plans for have the same
# table: `rlx diff configs/k31_target.py configs/qwen36_35b_proxy.py:final`.

# %%
names = [f"{RECIPE}:{MODELS[role]}" for role in ("target", "proxy")]
rlx("diff", *names, f"--to={REPORTS / 'diff'}")

# %% [markdown]
# The proxy's own edge tasks: attempts go where they decide most, until a stated share of misclassified tasks is
# reached. A quarter of the tasks here asks about letters, which these models have never seen. The pass rates have their
# intervals, and the split is a file that training reads.

# %%
few = 60 if SMOKE else 240
lines = (RUNS / "tasks.jsonl").read_text().splitlines()[:few]
words = ["".join(letters) for letters in itertools.islice(itertools.combinations("abcdefghij", 5), few // 3)]
lines += [json.dumps({"question": word, "answer": models.answer(word), "grader": "exact"}) for word in words]
(RUNS / "some_tasks.jsonl").write_text("\n".join(lines) + "\n")
some = f"--config.tasks.sources.digits.path={RUNS}/some_tasks.jsonl"
held = ["--config.tasks.held_out=10", "--held_out_similar=20", "--error=0.15", "--most=32"]
rlx("edge", *recipe("proxy"), some, *held, f"--to={REPORTS / 'edge'}")
split = REPORTS / "edge" / "edge.json"
evidence = json.loads(split.read_text())
print(f"{len(evidence['train'])} tasks to train on, {len(evidence['held_out_similar'])} held out")

# %% [markdown]
# ## Step 2: reproduce what is known of the target
#
# Both are trained; a process of its own evaluates the proxy's saved versions meanwhile, against its base model. The
# trainer neither waits for it nor knows of it.

# %%
RUNS.mkdir(parents=True, exist_ok=True)
saves = ["--config.checkpoint.every=2", "--config.checkpoint.keep=3"]
watch = [sys.executable, "-m", "rlx.cli", "evaluate", f"--watch={RUNS / 'proxy'}", "--poll=1", "--patience=300"]
with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watcher:
    own = [some, f"--config.tasks.split={split}", "--config.tasks.held_out=10"]
    rlx("train", *recipe("proxy"), *own, *saves, "--config.run.name=proxy")
    said = watcher.communicate()[0]
print("\n".join(said.splitlines()[:-1]))
rlx("train", *recipe("target"), *saves, "--config.run.name=target", "--config.tasks.held_out=20")
rlx("compare", RUNS / "target", RUNS / "proxy", f"--to={REPORTS / 'compare'}")

# %% [markdown]
# ## Step 3: new experiments on the proxy
#
# A sweep of the learning rate with seeds; the target runs it here, too, only to see below what the proxy is worth.

# %%
axis = "--axis=learner.learning_rate=3e-5,3e-4,3e-3"
for role in ("proxy", "target"):
    own = [f"--config.run.name={role}_sweep", "--config.tasks.held_out=20", axis, f"--seeds={SEEDS}"]
    rlx("sweep", *recipe(role), *own)
rlx("compare", RUNS / "proxy_sweep", f"--to={REPORTS / 'sweep'}", "--x=tokens")

# %% [markdown]
# ## Step 4: do they transfer?
#
# Kendall's tau between the two rankings, with an interval over the seeds, and which pairs are open. With so few seeds
# and updates it may well say "not decided"; then it also says how many more seeds a pair needs.

# %%
rlx("agree", RUNS / "target_sweep", RUNS / "proxy_sweep", f"--to={REPORTS / 'agree'}")
found = json.loads((REPORTS / "agree" / "agree.json").read_text())
low, high = found["kendall_interval"]
print(f"tau {found['kendall_tau']:.2f} [{low:.2f}, {high:.2f}], {len(found['undecided_pairs'])} pairs not decided")

# %% [markdown]
# The artefacts of every step: JSON for programs, Markdown for a review, a page for a browser, pictures for a talk.

# %%
for path in sorted(REPORTS.rglob("*")):
    if path.is_file():
        print(f"{path.relative_to(HOME)}  {path.stat().st_size / 1000:.0f} kB")
