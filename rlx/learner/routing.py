"""Mixtures of experts in an update: losses that balance routers, and how loaded their experts were.

Both losses are off (coefficient 0) in RL recipes: they would move a policy that generated the samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from rlx.algos.metrics import Metrics
from rlx.models.description import Architecture
from rlx.models.moe import Routing

# In `Metrics.counts`, of all micro-batches: tokens by [layer, expert], and `Routing.dropped` by [layer].
LOAD, DROPPED = "train/moe/load", "train/moe/dropped"


class RouterLosses(NamedTuple):
    """Coefficients of `Routing.balance` and `Routing.z`, each averaged over layers."""

    balance: float
    z: float


NO_LOSSES = RouterLosses(0.0, 0.0)


def with_routing(
    losses: RouterLosses,
    routing: Routing | None,
    share: Float[Array, ""],
    loss: Float[Array, ""],
    metrics: Metrics,
) -> tuple[Float[Array, ""], Metrics]:
    """(loss with the routers' own, metrics with theirs) of a micro-batch.

    share: of the batch's targets. The losses are not linear in the tokens, so unlike all others they are means of
      micro-batches' values, weighted by this, and depend on how the batch is cut.
    """
    if routing is None:
        return loss, metrics
    balance, z = routing.balance.mean(), routing.z.mean()
    stopped = jax.lax.stop_gradient
    means = {
        "train/moe/balance_loss": (stopped(balance) * share, share),
        "train/moe/z_loss": (stopped(z) * share, share),
    }
    counts = metrics.counts | {LOAD: stopped(routing.load), DROPPED: routing.dropped}
    metrics = dataclasses.replace(metrics, means=metrics.means | means, counts=counts)
    return loss + share * (losses.balance * balance + losses.z * z), metrics


def load_values(arch: Architecture, counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The numbers to log, of a whole batch's counts: nothing where the model has no experts.

    The largest load is that of a layer's busiest expert over its mean; 1 is perfect balance. CV is deviation / mean.
    """
    if LOAD not in counts:
        return {}
    load = np.asarray(counts[LOAD], np.float64)
    mean = np.maximum(load.mean(axis=1), 1e-9)
    largest, spread, dead = load.max(axis=1) / mean, load.std(axis=1) / mean, (load == 0).sum(axis=1)
    values = {
        "train/moe/max_load": float(largest.max()),
        "train/moe/load_cv": float(spread.mean()),
        "train/moe/dead_experts": float(dead.sum()),
        "train/moe/dropped_fraction": float(np.sum(counts[DROPPED]) / max(load.sum(), 1.0)),
    }
    for layer, *of_layer in zip(arch.expert_layers, largest, spread, dead, strict=True):
        names = ("max_load", "load_cv", "dead_experts")
        values |= {f"train/moe/{name}_layer_{layer}": float(x) for name, x in zip(names, of_layer, strict=True)}
    return values
