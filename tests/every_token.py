"""Targets whose sum is an expectation: every token of every state, weighted by the policy itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from rlx.algos.objective import Targets


def every_token(policy: Array, reference: Array, signal: Array, head: Array) -> Targets:
    """policy, reference: log-probs [states, V]; signal [states, V]; head: the candidates' ids, [states, K]."""
    states, vocabulary = policy.shape
    size = states * vocabulary
    at = lambda x: jnp.repeat(jnp.take_along_axis(x, head, 1), vocabulary, 0)  # noqa: E731
    return Targets(
        mask=jnp.ones(size, bool),
        tokens=jnp.tile(jnp.arange(vocabulary), states),
        sequences=jnp.ones(size, int),
        lengths=jnp.full(size, size),
        advantages=jnp.ones(size),
        sampler_logprobs=policy.ravel(),
        ages=jnp.zeros(size, int),
        weights=jnp.exp(policy).ravel(),
        reference_logprobs=reference.ravel(),
        head_ids=jnp.repeat(head, vocabulary, 0),
        signal=signal.ravel(),
        head_signal=at(signal),
        head_reference_logprobs=at(reference),
    )
