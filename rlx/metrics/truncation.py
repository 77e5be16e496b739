"""Were tokens drawn from less than the whole distribution: top-k, top-p or min-p?

Two traces. Where the sampler renormalised, its log-probs are above the full ones by -log of the mass that was kept.
Where it recorded the full softmax, as SGLang does, nothing shows in the log-probs, but tokens that should have been
drawn now and then never were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlx.metrics.attribution import Probe

TOP_P = (*np.arange(0.05, 1.0, 0.05).round(2).tolist(), 0.97, 0.98, 0.99, 0.995, 0.999)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
MISSING = 20.0  # draws that were to be expected and never came: one chance in e^20, for each of three rules


class Drawn(NamedTuple):
    """Of W sampled tokens, under the whole distribution at the recorded temperature."""

    logprob: np.ndarray  # float32 [W]
    rank: np.ndarray  # int [W]: tokens that are likelier
    before: np.ndarray  # float32 [W]: their mass
    top: np.ndarray  # float32 [W, K]: log-probs of the K likeliest, descending


class Rule(NamedTuple):
    name: str
    value: float
    expected: float  # draws that the rule forbids, and that were to be expected


def missing(drawn: Drawn) -> str:
    """Evidence that draws stopped somewhere; "" where there is none."""
    found = max(_rules(drawn), key=lambda rule: rule.expected)
    if found.expected < MISSING:
        return ""
    value = f"{found.value:.0f}" if found.name == "top-k" else f"{found.value:.3f}"
    return (
        f"tokens were drawn from less than the recorded distribution: none of {len(drawn.rank)} lies beyond "
        f"{found.name} {value}, where {found.expected:.0f} were to be expected"
    )


def _rules(drawn: Drawn) -> Iterator[Rule]:
    """The tightest top-k, top-p and min-p that allow every token that was drawn, with what each forbids."""
    mass = np.exp(drawn.top.astype(np.float64))
    cumulative = np.cumsum(mass, axis=1)
    kept = int(drawn.rank.max()) + 1
    if kept < mass.shape[1]:  # else nothing is known beyond it
        yield Rule("top-k", kept, float((1 - cumulative[:, kept - 1]).clip(0).sum()))
    edge = float(drawn.before.max())
    allowed = cumulative - mass <= edge + 1e-6
    yield Rule("top-p", edge, _beyond(allowed, mass))
    ratio = float(np.exp(drawn.logprob - drawn.top[:, 0]).min())
    yield Rule("min-p", ratio, _beyond(mass >= mass[:, :1] * ratio * (1 - 1e-6), mass))


def _beyond(allowed: np.ndarray, mass: np.ndarray) -> float:
    """Mass that is not allowed. Rows whose every candidate is may go on beyond them: they count as nothing."""
    forbidden = 1 - np.where(allowed, mass, 0).sum(1)
    return float(np.where(allowed.all(1), 0, forbidden).clip(0).sum())


def renormalised(drawn: Drawn, sampler: np.ndarray) -> list[Probe]:
    """The top-k, top-p and min-p that come nearest to the sampler's log-probs, if it had divided by the mass kept."""
    log_kept = np.log(np.cumsum(np.exp(drawn.top.astype(np.float64)), axis=1))
    wanted = (drawn.logprob - sampler)[:, None]
    # A token that a rule forbids was not drawn under it: what the rule predicts is then infinitely wrong.
    k = int(np.argmin(_distance(wanted - log_kept, drawn.rank[:, None] <= np.arange(log_kept.shape[1]))))
    before = np.exp(log_kept) - np.exp(drawn.top)
    families = {
        "top-p": ([(before < p) for p in TOP_P], TOP_P),
        "min-p": ([_likely(drawn.top, p) for p in MIN_P], MIN_P),
    }
    probes = [_probe(f"top-k {k + 1}", drawn.logprob - log_kept[:, k])]
    for name, (masks, values) in families.items():
        kept = np.stack([log_kept[np.arange(len(m)), m.sum(1) - 1] for m in masks], axis=1)
        allowed = np.stack([drawn.rank < m.sum(1) for m in masks], axis=1)
        best = int(np.argmin(_distance(wanted - kept, allowed)))
        probes.append(_probe(f"{name} {values[best]:g}", drawn.logprob - kept[:, best]))
    return probes


def _likely(top: np.ndarray, ratio: float) -> np.ndarray:
    return top >= top[:, :1] + math.log(ratio)


def _distance(gap: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Mean |gap| of each column, tokens that a column forbids counted as 10 nats."""
    return np.where(allowed, np.abs(gap), 10.0).mean(0)


def _probe(rule: str, predicted: np.ndarray) -> Probe:
    detail = f"against log-probs renormalised over {rule}"
    return Probe("truncated sampling", detail, predicted.astype(np.float32))
