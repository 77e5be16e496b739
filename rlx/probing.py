"""What a policy says of every token of a sequence, in the detail that an audit needs: one forward pass.

Not for training: a row of logits is made for each token, a chunk of them at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rlx.models.blockwise import default_block
from rlx.models.spec import Architecture, Params
from rlx.models.transformer import forward, head_matrix

CHUNK = 128  # rows of logits at once
CANDIDATES = 1024  # likeliest tokens kept of each row

# How the output head computes: as the policy does; inputs, weights and logits rounded to bfloat16; all in float32.
HeadMode = Literal["same", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """Weights under a name. `version`: updates so far, None where it is not known."""

    name: str
    arch: Architecture
    params: Params
    version: int | None = None

    @property
    def dtype(self) -> str:
        return str(self.params["embed"].dtype)

    def cast(self, dtype: str) -> Policy:
        """The same weights, and computing, in another type."""
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), self.params)
        return dataclasses.replace(self, name=f"{self.name} in {dtype}", params=params)

    def rounded(self) -> Policy:
        """Weights rounded to bfloat16, computing in the type that they have."""
        params = jax.tree.map(lambda x: jnp.asarray(jnp.asarray(x, "bfloat16"), x.dtype), self.params)
        return dataclasses.replace(self, name=f"{self.name} rounded to bfloat16", params=params)


class Rows(NamedTuple):
    """Of W tokens; row i is what predicts the i-th of them. Log-probs are at the asked temperature."""

    logprob: np.ndarray  # float32 [W]
    rank: np.ndarray  # int32 [W]: tokens that are likelier
    before: np.ndarray  # float32 [W]: their mass
    top: np.ndarray  # float32 [W, min(V, CANDIDATES)], descending
    tempered: np.ndarray  # float32 [W, temperatures]: the token's log-prob at each of them


def rows(
    policy: Policy,
    tokens: np.ndarray,
    temperature: float,
    *,
    temperatures: Sequence[float] = (),
    head: Params | None = None,
    head_mode: HeadMode = "same",
) -> Rows:
    """Of tokens[1:], the first of which the first token predicts.

    Args:
      head: parameters whose output head stands in for the policy's.
    """
    length = len(tokens)
    padded = np.zeros(max(CHUNK, 1 << (length - 1).bit_length()), np.int32)
    padded[:length] = tokens
    matrix = head_matrix(policy.params if head is None else head)
    grid = jnp.asarray([*temperatures] or [1.0], jnp.float32)
    made = _rows(
        policy.arch, head_mode, policy.params, matrix, jnp.asarray(padded), jnp.asarray(length), temperature, grid
    )
    return Rows(*(np.asarray(x)[: length - 1] for x in made))


def logprobs(policy: Policy, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """float32 [N - 1]: log p(token | those before it) of tokens[1:]."""
    return rows(policy, tokens, temperature).logprob


@partial(jax.jit, static_argnums=(0, 1))
def _rows(
    arch: Architecture,
    head_mode: HeadMode,
    params: Params,
    head: Float[Array, "vocab d"],
    tokens: Int[Array, " t"],
    length: Int[Array, ""],
    temperature: Float[Array, ""],
    grid: Float[Array, " temperatures"],
) -> tuple[Array, ...]:
    positions = jnp.arange(len(tokens))
    segments = (positions < length).astype(jnp.int32)
    block = default_block(len(tokens), accelerator=jax.default_backend() != "cpu")
    hidden = forward(arch, params, tokens[None], positions[None], segments[None], attention_block=block)[0]
    targets = jnp.roll(tokens, -1)

    def chunk(args: tuple[Array, Array]) -> tuple[Array, ...]:
        logits = _logits(args[0], head, head_mode)
        scaled = jax.nn.log_softmax(logits / temperature)
        own = jnp.take_along_axis(scaled, args[1][:, None], 1)
        likelier = scaled > own
        top = jax.lax.top_k(scaled, min(CANDIDATES, scaled.shape[1]))[0]
        raw = jnp.take_along_axis(logits, args[1][:, None], 1)
        normal = jax.lax.map(lambda t: jax.nn.logsumexp(logits / t, axis=-1), grid).T
        before = jnp.where(likelier, jnp.exp(scaled), 0).sum(-1)
        return own[:, 0], likelier.sum(-1, dtype=jnp.int32), before, top, raw / grid - normal

    split = (hidden.reshape(-1, CHUNK, hidden.shape[-1]), targets.reshape(-1, CHUNK))
    return tuple(x.reshape(-1, *x.shape[2:]) for x in jax.lax.map(chunk, split))


def _logits(hidden: Float[Array, "w d"], head: Float[Array, "vocab d"], mode: HeadMode) -> Float[Array, "w vocab"]:
    if mode != "same":
        hidden, head = hidden.astype(mode), head.astype(mode)
    product = jnp.einsum(
        "wd,vd->wv", hidden, head, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
    return product.astype("bfloat16").astype(jnp.float32) if mode == "bfloat16" else product
