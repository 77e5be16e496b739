# %% [markdown]
# # Advantages by hand
#
# An advantage says how much of its reward a sample gets credit for. Every method here is a few lines of
# `rlx/algos/advantages.py`; this page puts them side by side on groups small enough to check by hand.
#
# A few seconds. The figure goes to `docs/figures`, or to the directory that `RLX_FIGURES` names.

# %%
import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from configs.base import get_config
from rlx.algos.advantages import advantages, no_signal_groups, token_advantages
from rlx.config.parse import parse
from rlx.metrics.statistics import no_signal_probability

SMOKE = bool(os.environ.get("RLX_SMOKE"))
FIGURES = Path(os.environ.get("RLX_FIGURES", "docs/figures"))
objective = parse(get_config()).objective
METHODS = ("none", "group_mean", "leave_one_out", "group_std", "mean_normalised", "batch_whitened")


def credit(method, groups):
    """The advantages of groups of rewards, as one row of numbers."""
    config = dataclasses.replace(objective, advantage=method)
    rewards = jnp.asarray([reward for group in groups for reward in group], jnp.float32)
    ids = jnp.asarray([i for i, group in enumerate(groups) for _ in group])
    return np.asarray(advantages(config, rewards, ids, jnp.ones(len(rewards), bool)))


# %% [markdown]
# ## Four groups
#
# Four samples of four tasks: a hard one (one of four is right), an easy one (three of four), one with partial credit,
# and one where all are right.

# %%
GROUPS = {
    "hard": [1.0, 0.0, 0.0, 0.0],
    "easy": [1.0, 1.0, 1.0, 0.0],
    "partial credit": [0.4, 0.5, 0.5, 0.6],
    "all right": [1.0, 1.0, 1.0, 1.0],
}
table = np.stack([credit(method, GROUPS.values()) for method in METHODS])
print(f"{'':16}" + "".join(f"{name:>28}" for name in GROUPS))
for method, row in zip(METHODS, table):
    print(f"{method:16}" + "".join(f"{value:7.2f}" for value in row))

# %% [markdown]
# What to see:
#
# * `none` pushes every sample that has a reward, right or wrong: with rewards of 0 and 1 nothing is ever pushed down.
# * `group_mean` subtracts what the group got anyway. Each group's advantages add up to 0.
# * `leave_one_out` compares with the *others* only, which is unbiased: a sample is not its own baseline. It is
#   `group_mean` times G / (G - 1), here 4 / 3, so the choice is a choice of learning rate.
# * `group_std` gives every group about the same push, however small its differences: 0.4 against 0.6 counts as much as
#   0 against 1. Where the differences are noise of a grader, noise is what is amplified.
# * `mean_normalised` divides by the mean reward: a success on the hard task gets 3.0, one on the easy task 0.33.
# * `batch_whitened` knows no tasks: right is worth 0.87 wherever it is. "All right" is pushed up, which says nothing
#   about how to answer; on policy such pushes cancel on average and only add noise.

# %%
means, others = table[METHODS.index("group_mean")], table[METHODS.index("leave_one_out")]
np.testing.assert_allclose(others, means * 4 / 3, atol=1e-6)
np.testing.assert_allclose(means.reshape(4, 4).sum(1), 0, atol=1e-6)

# %% [markdown]
# ## What filtering removes
#
# A group whose rewards are all equal has advantage 0 under every group-relative method: training on it costs a forward
# and a backward pass and changes nothing. `rollout.filter_no_signal` leaves it out. How many groups that is depends on
# the pass rate p and the group's size: p^G + (1 - p)^G.

# %%
flat = jnp.asarray([reward for group in GROUPS.values() for reward in group])
signal = no_signal_groups(flat, jnp.repeat(jnp.arange(len(GROUPS)), 4), jnp.ones(len(flat), bool))
print(f"{int(signal.equal)} of {int(signal.groups)} groups without signal, {int(signal.all_one)} of them all right")
for size in (4, 8, 16):
    shares = [f"{no_signal_probability(p, size):6.1%} at p = {p}" for p in (0.05, 0.2, 0.5)]
    print(f"groups of {size:2}: without signal " + ", ".join(shares))

# %% [markdown]
# Filtering leaves `group_mean` as it is, but not the loss: under `token_mean` the denominator counts trained tokens, so
# without the silent groups every other group is pushed harder. And it moves the baseline of `batch_whitened`.

# %%
kept = [group for name, group in GROUPS.items() if name != "all right"]
moved = credit("batch_whitened", kept) - table[METHODS.index("batch_whitened")][:12]
print(f"batch_whitened moves by {moved.mean():+.2f} on average where the group without signal is filtered")
np.testing.assert_array_equal(credit("group_mean", kept), means[:12])

# %% [markdown]
# ## Which tasks get the push
#
# Groups of 8 with 0 to 8 right: the sum of |A| over the group is how hard the update pulls on this task.

# %%
SIZE = 8
outcomes = [[1.0] * right + [0.0] * (SIZE - right) for right in range(SIZE + 1)]
RELATIVE = ("group_mean", "leave_one_out", "group_std", "mean_normalised")
push = {method: np.abs(credit(method, outcomes)).reshape(-1, SIZE).sum(1) for method in RELATIVE}
for method, sums in push.items():
    print(f"{method:16}" + "".join(f"{value:7.2f}" for value in sums))

# %% [markdown]
# `group_mean` pulls most where half is right, like p (1 - p). `group_std` flattens that to its square root: a task
# with one success in eight is pulled 0.66 times as hard as an even one, with `group_mean` 0.44 times. `mean_normalised`
# pulls hardest on tasks that are hardly ever solved.

# %%
favour = {method: sums[1] / sums[SIZE // 2] for method, sums in push.items()}
print({method: round(float(value), 2) for method, value in favour.items()}, "push at 1 of 8 over push at 4 of 8")
assert favour["group_mean"] < favour["group_std"] < favour["mean_normalised"]

# %% [markdown]
# ## Credit along a response
#
# Every method so far gives all tokens of a sample the same. `gae` with the group's mean as critic lets credit decay
# with the distance from the reward, which comes at the end; at γλ = 1 it is `group_mean` again.

# %%
LENGTH = 16 if SMOKE else 64
whole = {"rewards": jnp.asarray([1.0, 0.0]), "groups": jnp.zeros(2, int), "valid": jnp.ones(2, bool)}
tokens = {"mask": jnp.ones(2 * LENGTH, bool), "samples": jnp.repeat(jnp.arange(2), LENGTH)}
decay = {}
for gae_lambda in (1.0, 0.99, 0.95, 0.8):
    config = dataclasses.replace(objective, advantage="gae", discount=1.0, gae_lambda=gae_lambda)
    decay[gae_lambda] = np.asarray(token_advantages(config, **whole, **tokens))[:LENGTH]
    print(f"lambda {gae_lambda}: first token {decay[gae_lambda][0]:.3f}, last token {decay[gae_lambda][-1]:.3f}")
np.testing.assert_allclose(decay[1.0], 0.5, atol=1e-6)

# %% [markdown]
# ## The picture

# %%
figure, (left, middle, right) = plt.subplots(
    1, 3, figsize=(14, 3.8), layout="constrained", width_ratios=(2.4, 1.2, 1.2)
)
left.imshow(np.clip(table, -2, 2), cmap="RdBu", vmin=-2, vmax=2, aspect="auto")
for (row, column), value in np.ndenumerate(table):
    colour = "white" if abs(value) > 1.3 else "black"
    left.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
for boundary in (3.5, 7.5, 11.5):
    left.axvline(boundary, color="black", linewidth=1)
rewards = [reward for group in GROUPS.values() for reward in group]
left.set_yticks(range(len(METHODS)), METHODS)
left.set_xticks(range(len(rewards)), [f"{reward:g}" for reward in rewards])
left.set(title=" | ".join(GROUPS), xlabel="reward of the sample")
for method, sums in push.items():
    middle.plot(sums, marker="o", markersize=3, label=method)
middle.set(title="push on a task", xlabel=f"right of {SIZE}", ylabel="sum of |A| over the group")
middle.legend(fontsize=7)
for gae_lambda, values in decay.items():
    right.plot(values, label=f"gae, lambda = {gae_lambda}")
right.set(title="credit along a response", xlabel="token", ylabel="advantage")
right.legend(fontsize=7)
FIGURES.mkdir(parents=True, exist_ok=True)
figure.savefig(FIGURES / "02_advantages_by_hand.png", dpi=80)
