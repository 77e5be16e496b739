"""Samples of a tiny policy whose recorded log-probs have a known fault, written as a run's samples.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlx.models.transformer import forward, logits
from rlx.probing import HeadMode, Policy, rows
from tests import tiny_model, tiny_tokenizer

SAMPLES, PROMPT, WRITTEN = 12, 9, 40
Keep = Callable[[np.ndarray], np.ndarray]  # probabilities [S, V] -> bool [S, V]: may be drawn


@partial(jax.jit, static_argnums=0)
def _next(arch, params, tokens, length):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(arch, params, tokens, positions, (positions < length).astype(jnp.int32))
    return logits(params, hidden[:, length - 1])


def policy(seed: int = 0, version: int | None = None) -> Policy:
    return Policy(f"seed {seed}", tiny_model.ARCH, tiny_model.params(seed), version)


def nearby(size: float = 0.03) -> Policy:
    """What `policy()` may have been some updates before."""
    rng = np.random.default_rng(1)
    own = policy()
    moved = jax.tree.map(lambda x: x + jnp.asarray(size * rng.normal(size=x.shape), x.dtype), own.params)
    return dataclasses.replace(own, name="an older version", params=moved, version=0)


def everything(probabilities: np.ndarray) -> np.ndarray:
    return np.ones_like(probabilities, bool)


def top_k(k: int) -> Keep:
    return lambda p: p >= np.sort(p, -1)[:, -k][:, None]


def top_p(mass: float) -> Keep:
    def keep(p: np.ndarray) -> np.ndarray:
        order = np.argsort(-p, -1)
        ranked = np.take_along_axis(p, order, -1)
        kept = np.zeros_like(p, bool)
        np.put_along_axis(kept, order, np.cumsum(ranked, -1) - ranked < mass, -1)
        return kept

    return keep


def prompts(samples: int = SAMPLES) -> np.ndarray:
    return np.random.default_rng(5).integers(4, tiny_tokenizer.VOCAB_SIZE, (samples, PROMPT)).astype(np.int32)


def draw(
    who: Policy, *, temperature: float = 1.0, keep: Keep = everything, renormalise: bool = False, written: int = WRITTEN
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [S, PROMPT + written], log-probs [S, written]) as a sampler would record them."""
    tokens = np.zeros((SAMPLES, PROMPT + written), np.int32)
    tokens[:, :PROMPT] = prompts()
    recorded = np.zeros((SAMPLES, written), np.float32)
    rng, each = np.random.default_rng(3), np.arange(SAMPLES)
    for at in range(PROMPT, PROMPT + written):
        scores = np.asarray(_next(who.arch, who.params, jnp.asarray(tokens), at), np.float64) / temperature
        full = np.exp(scores - scores.max(-1, keepdims=True))
        full /= full.sum(-1, keepdims=True)
        kept = np.where(keep(full), full, 0)
        kept /= kept.sum(-1, keepdims=True)
        tokens[:, at] = [rng.choice(kept.shape[1], p=row) for row in kept]
        recorded[:, at - PROMPT] = np.log((kept if renormalise else full)[each, tokens[:, at]])
    return tokens, recorded


def recomputed(
    who: Policy, tokens: np.ndarray, *, head: Policy | None = None, head_mode: HeadMode = "same", first: int = 0
) -> np.ndarray:
    """The log-probs of the written tokens as another program gives them; `first`: prompt tokens that it never saw."""
    own = None if head is None else head.params
    made = [rows(who, row[first:], 1.0, head=own, head_mode=head_mode).logprob for row in tokens]
    return np.stack([row[PROMPT - first - 1 :] for row in made])


def write(path: Path, tokens: np.ndarray, recorded: np.ndarray, version: int = 1) -> Path:
    """samples.jsonl of these."""
    lines = [
        {
            "update": 1,
            "phase": "train",
            "prompt_tokens": PROMPT,
            "tokens": row.tolist(),
            "logprobs": logprobs.tolist(),
            "versions": [[version, PROMPT, len(row)]],
        }
        for row, logprobs in zip(tokens, recorded, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
