"""Is a sampler's head what centering takes it for? Checked on the host for every record before it is trained on."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

MASS_TOLERANCE = 1e-3  # of Σ q over the head above 1
AGREEMENT_TOLERANCE = 1e-3  # nats between the two log-probs of a sampled token that is in its head


def head_problems(
    ids: Int[np.ndarray, "tokens K"],
    logprobs: Float[np.ndarray, "tokens K"],
    tokens: Int[np.ndarray, " tokens"],
    token_logprobs: Float[np.ndarray, " tokens"],
) -> list[str]:
    """What is wrong with the heads of one sample's written tokens, a line for each kind with its first place.

    A head has K distinct ids and finite log-probs whose probabilities sum to at most 1; where the sampled token is one
    of them both its log-probs agree. The last catches heads that are shifted by a token.
    """
    ordered = np.sort(ids, axis=-1)
    mass = np.exp(np.where(np.isfinite(logprobs), logprobs, -np.inf)).sum(-1)
    hit = ids == tokens[:, None]
    with np.errstate(invalid="ignore"):  # of infinities, which the second line reports
        gap = np.where(hit, np.abs(logprobs - token_logprobs[:, None]), 0).max(-1, initial=0)
    kinds = (
        ("an id twice in its head", (ordered[:, 1:] == ordered[:, :-1]).any(-1)),
        ("a log-prob that is not finite in its head", ~np.isfinite(logprobs).all(-1)),
        (f"a head whose mass is above 1 + {MASS_TOLERANCE}", mass > 1 + MASS_TOLERANCE),
        ("a log-prob that is not the one its head has for it: a shift by a token?", gap > AGREEMENT_TOLERANCE),
    )
    return [
        f"{int(wrong.sum())} of {len(wrong)} tokens have {what}; the first is token {int(wrong.argmax())}"
        for what, wrong in kinds
        if wrong.any()
    ]
