"""The loss-contract kit: a batch of samples, the ways to lay it out, and every objective a configuration can name.

A batch is held sample by sample in flat arrays [L]. A layout is an array of indices into them, [slices, n], with -1 for
padding: any micro-batch count, packing, padding and order is one. `evaluate` gives loss, metrics and the gradient with
respect to the flat logits, so that two layouts can be compared number by number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.base import get_config
from rlx.algos.aggregation import aggregation_weights
from rlx.algos.metrics import Metrics
from rlx.algos.objective import Targets, objective
from rlx.config.objective import ObjectiveConfig
from rlx.config.objective_checks import refusals
from rlx.config.schema import RolloutConfig
from tests.oracle_adapter import base_objective, dense_stats

VOCABULARY, CANDIDATES = 7, 3
LENGTHS = (1, 6, 3, 8, 2, 4)  # of the samples, masked tokens included
SLICES, WIDTH = 8, sum(LENGTHS)
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "loss": ("reinforce", "tis", "icepop", "ppo_clip", "ppo_dual_clip", "ppo_clip_tis", "cispo", "gspo", "dppo_tv"),
    "centering": ("off", "none", "tis", "mis"),
    "importance_level": ("token", "geometric", "sum"),
    "sequence_mask": ("off", "geometric", "sum"),
    "aggregation": (
        "token_mean",
        "sequence_mean_token_mean",
        "sequence_mean_token_sum",
        "sequence_mean_token_sum_norm",
    ),
    "kl_coefficient": (0.0, 0.1),
    "kl_estimator": ("k1", "k2", "k3"),
    "entropy_coefficient": (0.0, 0.01),
    "use_rollout_logprobs": (False, True),
    "distill.form": ("off", "sampled", "top_k", "full"),
    "distill.signal": ("proxy", "teacher"),
    "distill.calibration": ("constant", "entropy", "overlap"),
    "distill.filter": ("all", "agreeing", "rewarded"),
}
# Bounds that some of the test's tokens cross and others do not.
BOUNDS = {"mask_low": 0.8, "mask_high": 1.3, "tis_cap": 1.2, "cispo_low": 0.9, "cispo_high": 1.2, "tv_delta": 0.02}
BOUNDS |= {"clip_low": 0.05, "clip_high": 0.06, "dual_clip": 1.1, "sequence_mask_low": 0.9, "sequence_mask_high": 1.1}
ROLLOUT = RolloutConfig(**get_config().rollout.to_dict() | {"filter_no_signal": False})


class Batch(NamedTuple):
    """`targets` are flat [L]; `logits` [L, V]."""

    targets: Targets
    logits: jax.Array


BASE = base_objective(kl_placement="loss", **BOUNDS)


class Outcome(NamedTuple):
    loss: jax.Array
    gradient: jax.Array  # [L, V]
    metrics: Metrics


def configure(choices: Mapping[str, Any]) -> ObjectiveConfig:
    """A configuration of the choices; what follows from them, such as λ of a teacher, is filled in."""
    distill = {k.partition(".")[2]: v for k, v in choices.items() if "." in k}
    distill["lam"] = 1.0 if distill["signal"] == "teacher" else 1.5
    follows = {
        "distill": dataclasses.replace(BASE.distill, **distill),
        "advantage": "none" if distill["filter"] == "rewarded" else "group_mean",
        "kl_placement": "reward" if choices["kl_estimator"] == "k1" else "loss",
    }
    return dataclasses.replace(BASE, **follows, **{k: v for k, v in choices.items() if "." not in k})


def completions(fixed: Mapping[str, Any], rng: np.random.Generator, wanted: int) -> list[dict[str, Any]]:
    """Up to `wanted` allowed choices with `fixed` among them, the others drawn; none where 200 draws find none."""
    found: list[dict[str, Any]] = []
    for _ in range(200):
        drawn = {k: v[0] if rng.random() < 0.35 else v[rng.integers(len(v))] for k, v in CHOICES.items()}
        choices = {**drawn, **fixed}
        if len(found) < wanted and not refusals(configure(choices), ROLLOUT):
            found.append(choices)
    return found


def covering_objectives() -> list[ObjectiveConfig]:
    """Objectives that together have every pair of values that one configuration can have."""
    rng = np.random.default_rng(0)
    covered: set[Any] = set()
    found = []
    for a, b in itertools.combinations(CHOICES, 2):
        for pair in itertools.product(((a, x) for x in CHOICES[a]), ((b, y) for y in CHOICES[b])):
            options = [] if pair in covered else completions(dict(pair), rng, wanted=8)
            if options:
                choices = max(options, key=lambda c: len(_pairs(c) - covered))
                covered |= _pairs(choices)
                found.append(configure(choices))
    return found


def _pairs(choices: Mapping[str, Any]) -> set[Any]:
    return set(itertools.combinations(choices.items(), 2))


def draw_batch(config: ObjectiveConfig, seed: int) -> Batch:
    """Six samples of a sampler that lags, with every input that some objective reads."""
    rng = np.random.default_rng(seed)
    size = WIDTH
    logits = rng.normal(size=(size, VOCABULARY))
    models = {name: jax.nn.log_softmax(logits + noise) for name, noise in _noise(rng, logits.shape).items()}
    sampler = models["sampler"]
    tokens = np.array([rng.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum()) for row in np.asarray(sampler)])
    count = VOCABULARY if config.distill.form == "full" else CANDIDATES
    head = jnp.argsort(-sampler, -1)[:, :count].astype(jnp.int32)
    own = {name: model[np.arange(size), tokens] for name, model in models.items()}
    heads = {name: jnp.take_along_axis(model, head, -1) for name, model in models.items()}
    sequences = np.repeat(np.arange(1, len(LENGTHS) + 1), LENGTHS)
    mask = (rng.random(size) < 0.7) | (sequences == 1)
    targets = Targets(
        mask=jnp.asarray(mask),
        tokens=jnp.asarray(tokens, jnp.int32),
        sequences=jnp.asarray(sequences, jnp.int32),
        lengths=jnp.asarray(np.bincount(sequences, mask)[sequences], jnp.int32),
        advantages=jnp.asarray(rng.normal(size=len(LENGTHS) + 1)[sequences]),
        sampler_logprobs=own["sampler"],
        ages=jnp.asarray(rng.integers(0, 9, size), jnp.int32),
        weights=jnp.zeros(size),  # of the whole layout: `evaluate` fills them in
        old_logprobs=own["old"] if seed % 2 else None,
        reference_logprobs=own["reference"],
        head_ids=head,
        head_logprobs=heads["sampler"],
        signal=own["expert"] - own["base"],
        head_signal=heads["expert"] - heads["base"],
        head_reference_logprobs=heads["reference"],
        teacher_logprobs=own["expert"],
        overlap=jnp.asarray(rng.random(size)),
        known=jnp.asarray(rng.random(size) < 0.9),
        head_known=jnp.asarray(rng.random(head.shape) < 0.9),
    )
    return Batch(targets, jnp.asarray(logits))


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    scales = {"sampler": 0.3, "old": 0.1, "reference": 0.5, "expert": 1.0, "base": 0.5}
    return {name: scale * rng.normal(size=shape) for name, scale in scales.items()}


def draw_layout(rng: np.random.Generator, used: int) -> np.ndarray:
    """Samples in any order over `used` slices, padding in between: int [SLICES, WIDTH], -1 = padding."""
    ends = np.cumsum(LENGTHS)
    members: list[list[int]] = [[] for _ in range(SLICES)]
    for sample in rng.permutation(len(LENGTHS)):
        members[rng.integers(used)].extend(range(ends[sample] - LENGTHS[sample], ends[sample]))
    layout = np.full((SLICES, WIDTH), -1)
    for row, indices in zip(layout, members):
        row[np.sort(rng.choice(WIDTH, len(indices), replace=False))] = indices
    return rng.permutation(layout)


def plain_layout() -> np.ndarray:
    """Every token in one slice, in order."""
    return np.concatenate([np.arange(WIDTH)[None], np.full((SLICES - 1, WIDTH), -1)])


def evaluate(config: ObjectiveConfig, batch: Batch, layout: jax.Array, poison: jax.Array) -> Outcome:
    """Loss, its gradient with respect to the flat logits, and metrics of the batch laid out like this.

    `poison`: masked positions and padding hold garbage, NaN and infinities.
    """
    targets = jax.tree.map(lambda x: x[layout], batch.targets)
    mask = targets.mask & (layout >= 0)
    weights = aggregation_weights(config, mask.ravel(), targets.sequences.ravel(), num_sequences=len(LENGTHS))
    targets = dataclasses.replace(targets, mask=mask, weights=weights.reshape(mask.shape))
    spoiled = dataclasses.replace(jax.tree.map(partial(_spoil, mask, poison), targets), mask=mask)

    def total(logits: jax.Array) -> tuple[jax.Array, Metrics]:
        stats = jax.vmap(dense_stats)(logits[layout], targets)
        # Added, not selected: a NaN that the objective sends back here must reach the logits.
        stats = jax.tree.map(lambda x: x + _spoil(mask, poison, jnp.zeros_like(x)), stats)
        losses, metrics = jax.vmap(partial(objective, config))(stats, spoiled)
        return losses.sum(), metrics.reduce()

    (loss, metrics), gradient = jax.value_and_grad(total, has_aux=True)(batch.logits)
    return Outcome(loss, gradient, metrics)


def _spoil(mask: jax.Array, poison: jax.Array, x: jax.Array) -> jax.Array:
    index = jnp.arange(x.size).reshape(x.shape)
    garbage = (
        jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])[index % 3] if x.dtype.kind == "f" else (index * 7919) % 1000 - 500
    )
    spoiled = poison & ~mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return jnp.where(spoiled, garbage.astype(x.dtype), x)


def assert_same(got: Outcome, expected: Outcome) -> None:
    """Equal up to the order of float64 sums."""
    np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(got.gradient, expected.gradient, rtol=1e-9, atol=1e-13)
    got_values, values = got.metrics.values(), expected.metrics.values()
    assert got_values.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_allclose(got_values[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
