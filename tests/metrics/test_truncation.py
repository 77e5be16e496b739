"""Draws from less than the whole distribution are noticed, whole ones are not, whatever their length."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.metrics.attribution import attribute
from rlx.metrics.truncation import Drawn, missing, renormalised

VOCAB, WRITTEN = 64, 800


def kept(rule: str, probabilities: np.ndarray) -> np.ndarray:
    """bool [W, V] of probabilities that descend."""
    ranks, before = np.arange(VOCAB), np.cumsum(probabilities, -1) - probabilities
    return {
        "none": np.ones_like(probabilities, bool),
        "top-k": np.broadcast_to(ranks < 12, probabilities.shape),
        "top-p": before < 0.85,
        "min-p": probabilities >= 0.1 * probabilities[:, :1],
    }[rule]


def draw(rule: str, seed: int = 0) -> tuple[Drawn, np.ndarray]:
    """Tokens drawn under a rule, and the log of the mass that it keeps."""
    rng = np.random.default_rng(seed)
    scores = np.sort(rng.normal(0, 1.5, (WRITTEN, VOCAB)), axis=1)[:, ::-1] * rng.uniform(0.5, 1.5, (WRITTEN, 1))
    full = np.exp(scores)
    full /= full.sum(1, keepdims=True)
    allowed = np.where(kept(rule, full), full, 0)
    mass = allowed.sum(1)
    rank = np.array([rng.choice(VOCAB, p=row / row.sum()) for row in allowed])
    each, logprob = np.arange(WRITTEN), np.log(full)
    before = (np.cumsum(full, 1) - full)[each, rank]
    top = logprob.astype(np.float32)
    return Drawn(top[each, rank], rank, before.astype(np.float32), top), np.log(mass)


@pytest.mark.parametrize("seed", range(5))
def test_whole_distributions_raise_no_suspicion(seed):
    assert missing(draw("none", seed)[0]) == ""


@pytest.mark.parametrize("rule", ["top-k", "top-p", "min-p"])
def test_draws_that_never_came_name_the_rule(rule):
    said = missing(draw(rule)[0])
    assert f"beyond {rule}" in said, said


def test_a_short_sample_is_not_enough_to_tell():
    drawn = draw("top-p")[0]
    assert missing(Drawn(*(x[:20] for x in drawn))) == ""


@pytest.mark.parametrize("rule", ["top-k", "top-p", "min-p"])
def test_renormalised_log_probs_name_the_rule_and_its_value(rule):
    drawn, log_mass = draw(rule)
    sampler = (drawn.logprob - log_mass).astype(np.float32)
    found = attribute(sampler, drawn.logprob, renormalised(drawn, sampler), "float32", missing(drawn))
    value = {"top-k": "top-k 12", "top-p": "top-p 0.85", "min-p": "min-p 0.1"}[rule]
    assert found.cause == "truncated sampling"
    assert f"over {value} " in found.evidence


def test_where_log_probs_agree_truncation_is_still_the_finding():
    drawn = draw("top-k")[0]
    found = attribute(drawn.logprob, drawn.logprob, [], "float32", missing(drawn))
    assert found.cause == "truncated sampling"
