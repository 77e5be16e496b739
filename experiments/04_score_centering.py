# %% [markdown]
# # Score centering: the drift and what is left without it
#
# Off policy, the expected REINFORCE gradient has two parts (arXiv 2609.20807): the covariance of advantage and score,
# which is what one wants, and the mean advantage times the sampler's mean score, a *drift* that knows nothing of the
# rewards. Subtracting the group's mean reward makes the mean advantage zero over whole sequences, but not after a given
# prefix: after a lucky beginning it stays positive, after an unlucky one negative. Positive, it pulls p back to the
# sampler q; negative, it pushes p away from q, the further the faster.
#
# About a minute. The figure goes to `docs/figures`, or to the directory that `RLX_FIGURES` names.

# %%
import dataclasses
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
from rlx.algos.advantages import advantages
from rlx.algos.objective import Targets, objective
from rlx.config.parse import parse

SMOKE = bool(os.environ.get("RLX_SMOKE"))
FIGURES = Path(os.environ.get("RLX_FIGURES", "docs/figures"))

# %% [markdown]
# ## A world of luck and skill
#
# A sequence is a coin that the policy does not throw, like a tool's answer, and three tokens that it writes, out of
# eight. The reward is the quality of what was written, between 0 and 1 and drawn at random, plus 3 where the coin was
# lucky. So luck decides most of a sample's advantage, and it is there at every prefix, whatever is learned, as an early
# mistake or a hard subtask is in a long response. All 1,024 sequences can be summed over.

# %%
V, T = 8, 3
COINS, *WRITTEN = np.indices((2,) + (V,) * T).reshape(T + 1, -1)
TOKENS = jnp.asarray(np.stack(WRITTEN, 1), jnp.int32)  # [sequences, T]
PREFIXES = (V**T - 1) // (V - 1)  # of each side of the coin
number = np.arange(V**T)
prefix = np.stack([(V**t - 1) // (V - 1) + number // V ** (T - t) for t in range(T)], 1)
STATES = jnp.asarray(np.concatenate([prefix, PREFIXES + prefix]))  # [sequences, T]
rng = np.random.default_rng(1)
QUALITY = jnp.asarray(rng.random(2 * V**T), jnp.float32)
LUCK = 3.0
start = jnp.asarray(0.3 * rng.normal(size=(2 * PREFIXES, V)), jnp.float32)
offset = jnp.asarray(rng.normal(size=start.shape), jnp.float32)  # of logits: a sampler that is always a little wrong


def sequence_logprobs(logits):
    return jax.nn.log_softmax(logits)[STATES, TOKENS].sum(1) - jnp.log(2.0)


def batch_of(sampler, sequences, advantage, weights, k):
    """The targets of chosen sequences, with the sampler's k likeliest tokens at each."""
    q = jax.nn.log_softmax(sampler)[STATES[sequences].ravel()]
    tokens = TOKENS[sequences].ravel()
    head_logprobs, head_ids = jax.lax.top_k(q, k)
    return Targets(
        mask=jnp.ones(tokens.shape, bool),
        tokens=tokens,
        sequences=jnp.repeat(jnp.arange(1, len(sequences) + 1), T),
        lengths=jnp.full(tokens.shape, T),
        advantages=jnp.repeat(advantage, T),
        sampler_logprobs=jnp.take_along_axis(q, tokens[:, None], 1)[:, 0],
        ages=jnp.zeros(tokens.shape, jnp.int32),
        weights=jnp.repeat(weights, T),
        head_ids=head_ids,
        head_logprobs=head_logprobs,
    )


def gradient_of(config, logits, sequences, targets):
    """(gradient of the objective, metrics). A table of logits is a head of identity weights."""

    def loss(logits):
        hidden = logits[STATES[sequences].ravel()]
        stats = token_stats(hidden, jnp.eye(V), targets.tokens, targets.head_ids, implementation="reference")
        return objective(config, stats, targets)

    return jax.grad(loss, has_aux=True)(logits)


EVERY = jnp.arange(2 * V**T)


@partial(jax.jit, static_argnums=(0, 4))
def expected_gradient(config, logits, sampler, advantage, k):
    """Over everything that the sampler can write."""
    targets = batch_of(sampler, EVERY, advantage, jnp.exp(sequence_logprobs(sampler)), k)
    return gradient_of(config, logits, EVERY, targets)[0]


# %% [markdown]
# ## A constant advantage
#
# If every sequence is worth the same there is nothing to learn, and the expected gradient should be zero. Without
# centering it is not. With the whole vocabulary as the head it is zero for every weight f, to the last bits of float32;
# with fewer candidates a residue is left, because beyond the head q is taken to be proportional to p.

# %%
base = dataclasses.replace(parse(get_config()).objective, centering="off")
OFF = {
    f: dataclasses.replace(base, loss=loss) for f, loss in (("none", "reinforce"), ("tis", "tis"), ("mis", "icepop"))
}
ON = {f: dataclasses.replace(config, centering=f) for f, config in OFF.items()}
HEADS = (2, V) if SMOKE else (1, 2, 4, V)
ones = jnp.ones(len(EVERY))
wrong = start + offset


def residue(config, k):
    return float(jnp.linalg.norm(expected_gradient(config, start, wrong, ones, k)))


residues = {f: [residue(OFF[f], V)] + [residue(ON[f], k) for k in HEADS] for f in ON}
print(f"{'':6}{'off':>10}" + "".join(f"{f'K = {k}':>10}" for k in HEADS))
for f, row in residues.items():
    print(f"{f:6}" + "".join(f"{value:10.1e}" for value in row))
    assert row[0] > 1e-3
    assert row[-1] < 1e-6

# %% [markdown]
# ## Training
#
# Four groups of eight a step, group-mean advantages, plain gradient descent. The samples come from the policy `lag`
# updates ago, or from the present one with its logits off by a fixed amount, as by a quantised engine. The quality is
# exact, and so are the two parts of the expected gradient: what centering with the whole vocabulary leaves is the
# covariance, and whatever a method adds to that is its drift.


# %%
class World(NamedTuple):
    lag: int  # updates
    mismatch: float  # size of the offset of the sampler's logits
    luck: float


WORLDS = {
    "on policy": World(0, 0.0, LUCK),
    "lag 128": World(128, 0.0, LUCK),
    "mismatch 1": World(0, 1.0, LUCK),
    "mismatch 2": World(0, 2.0, LUCK),
    "lag 128, no luck": World(128, 0.0, 0.0),
}
METHODS = {
    "REINFORCE": (OFF["none"], V),
    "REINFORCE, centred": (ON["none"], V),
    "REINFORCE, centred, K = 2": (ON["none"], 2),
    "TIS": (OFF["tis"], V),
    "TIS, centred": (ON["tis"], V),
}
if SMOKE:
    METHODS = {name: METHODS[name] for name in ("REINFORCE", "TIS, centred")}
LONGEST = max(world.lag for world in WORLDS.values())
SEEDS, POINTS, BETWEEN = (2, 4, 5) if SMOKE else (8, 40, 40)
GROUPS, SIZE, RATE = 4, 8, 0.75


class Seen(NamedTuple):
    quality: jax.Array  # expected, of the trainer
    unlucky: jax.Array  # entropy of what is written after an unlucky coin, nats
    lucky: jax.Array  # and after a lucky one
    divergence: jax.Array  # KL(q || p), nats a sequence
    drift: jax.Array  # norm of the expected gradient's drift
    covariance: jax.Array  # norm of its covariance


def look(config, k, logits, sampler, rewards):
    """Exact values of a trainer and its sampler."""
    p, q = sequence_logprobs(logits), sequence_logprobs(sampler)
    after_coin = p.reshape(2, -1) + jnp.log(2.0)
    entropy = -(jnp.exp(after_coin) * after_coin).sum(1)
    advantage = rewards - jnp.exp(q) @ rewards
    clean = dataclasses.replace(config, centering={"reinforce": "none", "tis": "tis"}[config.loss])
    whole = expected_gradient(config, logits, sampler, advantage, k)
    covariance = expected_gradient(clean, logits, sampler, advantage, V)
    return Seen(
        quality=jnp.exp(p) @ QUALITY,
        unlucky=entropy[0],
        lucky=entropy[1],
        divergence=jnp.exp(q) @ (q - p),
        drift=jnp.linalg.norm(whole - covariance),
        covariance=jnp.linalg.norm(covariance),
    )


@partial(jax.jit, static_argnums=(0, 1))
def train(config, k, world, key):
    """What was seen every BETWEEN updates, [POINTS]."""
    rewards = QUALITY + world.luck * COINS
    group = jnp.repeat(jnp.arange(GROUPS), SIZE)

    def sampler_at(history, update):
        return history[(update - world.lag) % (LONGEST + 1)] + world.mismatch * offset

    def step(carry, key):
        history, update = carry
        sampler, logits = sampler_at(history, update), history[update % (LONGEST + 1)]
        chosen = jax.random.choice(key, len(EVERY), group.shape, p=jnp.exp(sequence_logprobs(sampler)))
        advantage = advantages(config, rewards[chosen], group, jnp.ones(group.shape, bool))
        targets = batch_of(sampler, chosen, advantage, jnp.full(group.shape, 1 / len(group)), k)
        new = logits - RATE * gradient_of(config, logits, chosen, targets)[0]
        return (history.at[(update + 1) % (LONGEST + 1)].set(new), update + 1), None

    def between(carry, keys):
        history, update = jax.lax.scan(step, carry, keys)[0]
        seen = look(config, k, history[update % (LONGEST + 1)], sampler_at(history, update), rewards)
        return (history, update), seen

    history = jnp.tile(start, (LONGEST + 1, 1, 1))
    return jax.lax.scan(between, (history, LONGEST), jax.random.split(key, (POINTS, BETWEEN)))[1]


keys = jax.random.split(jax.random.key(0), SEEDS)
stacked = World(*(jnp.asarray(field) for field in zip(*WORLDS.values())))
over_all = jax.vmap(jax.vmap(train, in_axes=(None, None, None, 0)), in_axes=(None, None, 0, None))
runs = {name: jax.device_get(over_all(config, k, stacked, keys)) for name, (config, k) in METHODS.items()}

# %% [markdown]
# The final quality, mean and standard deviation over seeds. The rest are means over the first half of a run, where
# there is still something to learn: the entropy of what is written after an unlucky and after a lucky coin, of 6.24
# nats at most; how far the sampler is from the trainer; and the norms of drift and covariance.

# %%
half = slice(0, POINTS // 2)
for i, world in enumerate(WORLDS):
    print(f"\n{world:28}   final quality   unlucky     lucky   KL(q||p)     drift  covariance")
    for name, seen in runs.items():
        final = seen.quality[i, :, -1]
        rest = [getattr(seen, field)[i, :, half].mean() for field in Seen._fields[1:]]
        numbers = "{:10.2f}{:10.2f}{:11.3f}{:10.4f}{:12.4f}".format(*rest)
        print(f"{name:28}   {final.mean():.3f} ± {final.std():.3f}{numbers}")
on_policy, lagging = (runs["REINFORCE"].drift[list(WORLDS).index(world)] for world in ("on policy", "lag 128"))
assert on_policy.max() < 1e-6 < 1e-3 < lagging.max()
if not SMOKE:
    lagging, centred = (runs[name].quality[1, :, -1].mean() for name in ("REINFORCE", "REINFORCE, centred"))
    assert lagging < centred - 0.1

# %% [markdown]
# * **Luck and lag.** REINFORCE's drift is many times its covariance. After an unlucky coin it feeds itself: p runs away
#   from q, and the entropy is gone before it is known what is good. After a lucky coin it holds p back where q was, and
#   hardly anything is learned. At first this looks like fast learning: to run on in the last direction is momentum.
# * **No luck.** With the same lag and the quality alone as the reward, the mean advantage after a prefix is small, so
#   is the drift, and centering makes no difference. Subtracting the group's mean was enough.
# * **TIS** has little drift of its own: below the cap f(r) = r, and the ratio needs no centering.
# * **A head of 2 of 8** removes the part of the drift that it can see; with lag the rest feeds itself as before.
#
# ## What a run can see
#
# The exact drift needs all sequences. A run reports `centering/drift_norm` and `centering/covariance_norm`, which are
# norms of single tokens: their noise does not cancel as it does in an average, so beside the drift the covariance looks
# far larger than it is in the expected gradient. Watch how they change, not their ratio.

# %%
rewards = QUALITY + LUCK * COINS
q = jnp.exp(sequence_logprobs(wrong))
drawn = jax.random.choice(jax.random.key(1), len(EVERY), (256 if SMOKE else 4096,), p=q)
batch = batch_of(wrong, drawn, rewards[drawn] - q @ rewards, jnp.ones(len(drawn)), V)
metrics = jax.jit(gradient_of, static_argnums=0)(ON["none"], start, drawn, batch)[1].values()
drift, covariance = metrics["centering/drift_norm"], metrics["centering/covariance_norm"]
seen = look(OFF["none"], V, start, wrong, rewards)
print(f"single tokens: drift {drift:.2f}, covariance {covariance:.2f}, ratio {drift / covariance:.2f}")
print(f"expected gradient: drift {seen.drift:.3f}, covariance {seen.covariance:.3f}", end=", ")
print(f"ratio {seen.drift / seen.covariance:.2f}")

# %% [markdown]
# ## The picture


# %%
def draw(axis, world, field, title, style="-", **settings):
    i, updates = list(WORLDS).index(world), BETWEEN * (1 + np.arange(POINTS))
    for colour, (name, seen) in enumerate(runs.items()):
        values = getattr(seen, field)[i]
        mean, spread = values.mean(0), values.std(0)
        axis.plot(updates, mean, style, color=f"C{colour}", label=name)
        if field == "quality":
            axis.fill_between(updates, mean - spread, mean + spread, color=f"C{colour}", alpha=0.15, linewidth=0)
    axis.set(title=title, xlabel="updates", **settings)


figure, axes = plt.subplots(2, 4, figsize=(16, 6.6), layout="constrained")
for f, row in residues.items():
    axes[0, 0].semilogy(["off", *(f"{k}" for k in HEADS)], row, marker="o", markersize=4, label=f"f: {f}")
axes[0, 0].set(title="constant advantage: expected gradient", xlabel="K of 8 candidates", ylabel="norm")
axes[0, 0].legend(fontsize=8)
draw(axes[0, 1], "lag 128", "drift", "lag 128: drift", yscale="log", ylim=(1e-4, 1), ylabel="norm")
draw(axes[0, 2], "lag 128", "covariance", "lag 128: covariance", yscale="log", ylim=(1e-4, 1), ylabel="norm")
draw(axes[0, 3], "lag 128", "unlucky", "")
draw(axes[0, 3], "lag 128", "lucky", "lag 128: entropy, dotted after a lucky coin", ":", ylabel="nats")
for axis, world in zip(axes[1], ("lag 128", "lag 128, no luck", "mismatch 1", "mismatch 2")):
    draw(axis, world, "quality", f"{world}: quality", ylim=(0.4, 1), ylabel="expected quality")
figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
FIGURES.mkdir(parents=True, exist_ok=True)
figure.savefig(FIGURES / "04_score_centering.png", dpi=80)
