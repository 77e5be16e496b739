# %% [markdown]
# # What lag does to importance weights
#
# In asynchronous training a sample was written by a policy that is some updates old: q wrote it, p is trained. Every
# importance weight answers that differently, and each pays in bias or in variance. Here the policy is a table over all
# prefixes of five tokens, so every expectation is a sum over 1,024 sequences: bias, variance and effective sample size
# are exact, not estimated.
#
# Less than a minute. The figure goes to `docs/figures`, or to the directory that `RLX_FIGURES` names.

# %%
import dataclasses
import math
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rlx_kernels.logprob import token_stats

from configs.base import get_config
from rlx.algos.metrics import Moments
from rlx.algos.objective import Targets, objective
from rlx.algos.policy_gradient import policy_loss, surrogate
from rlx.config.parse import parse

SMOKE = bool(os.environ.get("RLX_SMOKE"))
FIGURES = Path(os.environ.get("RLX_FIGURES", "docs/figures"))

# %% [markdown]
# ## A policy that can be enumerated
#
# Four tokens, sequences of five. `logits[state]` are those after a prefix; there are 1 + 4 + ... + 256 prefixes. The
# rewards are 0 or 1, drawn at random: one sequence in eight is right.

# %%
V, T = 4, (3 if SMOKE else 5)
TOKENS = jnp.asarray(np.indices((V,) * T).reshape(T, -1).T, jnp.int32)  # [sequences, T], in the order of their digits
STATES = jnp.asarray([[(V**t - 1) // (V - 1) + i // V ** (T - t) for t in range(T)] for i in range(V**T)])
PREFIXES = (V**T - 1) // (V - 1)
rng = np.random.default_rng(0)
REWARDS = jnp.asarray(rng.random(V**T) < 1 / 8, jnp.float32)
start = jnp.asarray(0.5 * rng.normal(size=(PREFIXES, V)), jnp.float32)


def token_logprobs(logits):
    """log p of every token of every sequence, [sequences, T]."""
    return jax.nn.log_softmax(logits)[STATES, TOKENS]


def probabilities(logits):
    """Of every sequence, [sequences]."""
    return jnp.exp(token_logprobs(logits).sum(1))


# %% [markdown]
# A table of logits is a head of identity weights, so `token_stats` and `objective` run on it as they do on a language
# model. `gradients` holds the gradient of each sequence as if it alone had been sampled: with those, the expectation
# of a gradient is a sum weighted by q, and so is its variance. The advantage is the reward minus its mean under q,
# which is the mean of an infinitely large group.


# %%
def sequence_loss(config, logits, states, tokens, advantage, sampler):
    """The objective of one sequence, summed over its tokens."""
    targets = Targets(
        mask=jnp.ones(T, bool),
        tokens=tokens,
        sequences=jnp.ones(T, jnp.int32),
        lengths=jnp.full(T, T),
        advantages=jnp.full(T, advantage),
        sampler_logprobs=sampler,
        ages=jnp.zeros(T, jnp.int32),
        weights=jnp.ones(T),
    )
    stats = token_stats(logits[states], jnp.eye(V), tokens, None, implementation="reference")
    return objective(config, stats, targets)[0]


@partial(jax.jit, static_argnums=0)
def gradients(config, logits, sampler_logits):
    """Of every sequence, [sequences, prefixes * V]."""
    advantages = REWARDS - probabilities(sampler_logits) @ REWARDS
    each = jax.vmap(jax.grad(partial(sequence_loss, config)), in_axes=(None, 0, 0, 0, 0))
    return each(logits, STATES, TOKENS, advantages, token_logprobs(sampler_logits)).reshape(V**T, -1)


# %% [markdown]
# ## The policies
#
# Gradient descent on the exact on-policy gradient. The last policy is the trainer, the earlier ones are its samplers.

# %%
base = dataclasses.replace(parse(get_config()).objective, centering="off")
reinforce = dataclasses.replace(base, loss="reinforce")


@jax.jit
def descend(logits):
    gradient = probabilities(logits) @ gradients(reinforce, logits, logits)
    return logits - 2.0 * gradient.reshape(logits.shape)


UPDATES = 64
history = [start]
for _ in range(UPDATES):
    history.append(descend(history[-1]))
trainer = history[-1]
exact = probabilities(trainer) @ gradients(reinforce, trainer, trainer)
LAGS = (0, 8, 64) if SMOKE else (0, 1, 2, 4, 8, 16, 24, 32, 48, 64)


def divergence(sampler):
    """KL(q || p) in nats a sequence."""
    q = probabilities(sampler)
    return float(q @ (token_logprobs(sampler) - token_logprobs(trainer)).sum(1))


DIVERGENCES = [divergence(history[UPDATES - lag]) for lag in LAGS]
print("pass rate", [round(float(probabilities(p) @ REWARDS), 3) for p in (history[0], history[UPDATES // 2], trainer)])
for lag, nats in zip(LAGS, DIVERGENCES):
    print(f"lag {lag:3}: KL(q || p) = {nats:.3f} nats a sequence")

# %% [markdown]
# ## The weights
#
# Each is a configuration, as a run would name it. A token's ratio p/q corrects which token was chosen, not how the
# prefix came about or how the sequence goes on; only the ratio of the whole sequence, without a bound, does all of it.

# %%
change = partial(dataclasses.replace, base)
WEIGHTS = {
    "none (reinforce)": reinforce,
    "token ratio": change(loss="tis", tis_cap=math.inf),
    "token, capped at 2 (TIS)": change(loss="tis", tis_cap=2.0),
    "token, masked outside [0.5, 5] (IcePop)": change(loss="icepop", mask_low=0.5, mask_high=5.0),
    "geometric mean, capped at 2": change(loss="tis", importance_level="geometric", tis_cap=2.0),
    "clipped to [0.8, 1.28] (PPO, old = q)": change(loss="ppo_clip", use_rollout_logprobs=True),
    "sequence ratio": change(loss="tis", importance_level="sum", tis_cap=math.inf),
    "sequence, capped at 2": change(loss="tis", importance_level="sum", tis_cap=2.0),
}


class Estimate(NamedTuple):
    """Of one sequence's gradient, in units of the length of the exact on-policy gradient."""

    bias: float
    cosine: float  # of the angle between the expected and the exact gradient
    deviation: float  # standard deviation, all coordinates together
    ess: float  # of the weights that the tokens' gradients carry


@partial(jax.jit, static_argnums=0)
def token_weights(config, logits, sampler_logits):
    """What multiplies A · ∇ log p at each token, [sequences, T]."""
    rule = surrogate(config)
    advantages = REWARDS - probabilities(sampler_logits) @ REWARDS

    def one(logprobs, sampler, advantage):
        every, ids = jnp.ones(T, bool), jnp.zeros(T, jnp.int32)
        loss = policy_loss(rule, logprobs, sampler, sampler, jnp.full(T, advantage), every, ids)
        return jnp.where(loss.bounded & (rule.form == "ratio"), 0, loss.weight)

    return jax.vmap(one)(token_logprobs(logits), token_logprobs(sampler_logits), advantages)


def estimate(config, sampler):
    q = probabilities(sampler)
    each = gradients(config, trainer, sampler)
    mean = q @ each
    variance = q @ ((each - mean) ** 2).sum(1)
    weights = token_weights(config, trainer, sampler)
    moments = Moments(first=(q @ weights).sum(), second=(q @ weights**2).sum(), count=q.sum() * T)
    length = jnp.linalg.norm(exact)
    bias, cosine = jnp.linalg.norm(mean - exact) / length, mean @ exact / length / jnp.linalg.norm(mean)
    return Estimate(float(bias), float(cosine), float(jnp.sqrt(variance) / length), float(moments.ess))


estimates = {name: [estimate(w, history[UPDATES - lag]) for lag in LAGS] for name, w in WEIGHTS.items()}

# %% [markdown]
# On policy all weights are 1 and all estimates are the same: no bias, the same variance. The unbounded ratio of the
# sequence stays without bias at any lag: that is the theorem behind all the others, and a check of what is summed here.

# %%
for name, row in estimates.items():
    assert row[0].bias < 1e-4, name
    np.testing.assert_allclose(row[0].deviation, estimates["none (reinforce)"][0].deviation, rtol=1e-4)
for point in estimates["sequence ratio"]:
    assert point.bias < 2e-3

# %% [markdown]
# ## What it costs
#
# The error of a batch of n sequences is the root of bias² + variance / n. With few samples the variance decides, with
# many the bias; a bound that looks harmful at one batch size is right at another.

# %%
BATCHES = (64, 4096)


def error(point, n):
    return math.sqrt(point.bias**2 + point.deviation**2 / n)


for i in [LAGS.index(lag) for lag in LAGS if lag in (8, 32, 64)]:
    errors = "".join(f"{f'error, n = {n}':>17}" for n in BATCHES)
    print(f"\n{f'lag {LAGS[i]}, {DIVERGENCES[i]:.2f} nats':40}   bias  cosine  deviation   ESS{errors}")
    for name, row in estimates.items():
        numbers = f"{row[i].bias:7.3f} {row[i].cosine:7.3f} {row[i].deviation:10.2f} {row[i].ess:5.2f}"
        print(f"{name:40}{numbers}" + "".join(f"{error(row[i], n):17.3f}" for n in BATCHES))

# %% [markdown]
# * **Token ratios** lower the deviation, hardly the bias. They mend the choice of a token, not the prefixes that q went
#   through, nor what it wrote afterwards.
# * **The sequence's ratio** mends all of it. At small lag it has the least bias and the least deviation; then its
#   deviation grows without a bound and its effective sample size goes to nothing.
# * **Capping it** costs nothing until the cap is reached. Then it cuts just the sequences that p has learned to prefer.
# * **Clipping to a narrow band around q** gives up the tokens that have moved most. It is made for a few steps from q.
# * **The effective sample size of token weights** stays high where the expected gradient has lost its direction: it
#   tells how noisy the weights are, not how much bias is left.
#
# ## The picture

# %%
TICKS = [lag for lag in LAGS if lag not in (24, 48)]
figure, axes = plt.subplots(1, 4, figsize=(16, 4.6), layout="constrained")
PANELS = (
    ("bias", "log", lambda p: max(p.bias, 1e-4)),
    ("standard deviation of one sequence", "log", lambda p: p.deviation),
    ("cosine of expected and exact gradient", "linear", lambda p: p.cosine),
    ("effective sample size of the weights", "linear", lambda p: p.ess),
)
for axis, (title, scale, value) in zip(axes, PANELS):
    for name, row in estimates.items():
        axis.plot(LAGS, [value(point) for point in row], marker="o", markersize=3, label=name)
    axis.set(title=title, xlabel="lag, updates", yscale=scale, xscale="symlog", xlim=(-0.2, LAGS[-1] * 1.2))
    axis.set_xticks(TICKS, [f"{lag}" for lag in TICKS])
axes[0].set(ylabel="units of the exact gradient's norm", ylim=(1e-3, None))
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
FIGURES.mkdir(parents=True, exist_ok=True)
figure.savefig(FIGURES / "03_staleness.png", dpi=80)
