"""The trainer's side in live tests: its log-probs of given tokens, and the links to the two servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orjson

from rlx.models.spec import Params
from rlx.models.transformer import forward, logits
from rlx.rollout.sglang_http import Server, SglangHttp
from rlx.rollout.sglang_requests import new_rid, score_body
from rlx.rollout.sglang_responses import parse_score
from tests import tiny_model

ARCH = tiny_model.ARCH
PATIENCE_S = 300.0  # with a server on a busy machine
TEXTS = tuple(np.random.default_rng(7).integers(0, ARCH.vocab_size, (2, 24), dtype=np.int32))


@partial(jax.jit, static_argnums=3)
def _logprobs(params: Params, tokens: jax.Array, adapter: Params, scale: float) -> jax.Array:
    row = tokens[None]
    hidden = forward(
        ARCH, params, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row), adapter=adapter, adapter_scale=scale
    )
    log_p = jax.nn.log_softmax(logits(params, hidden[0, :-1]))
    return jnp.take_along_axis(log_p, tokens[1:, None], 1)[:, 0]


def logprobs(params: Params, tokens: np.ndarray, adapter: Params | None = None, scale: float = 1.0) -> np.ndarray:
    """Of tokens 1 to T - 1, each given those before it, temperature 1."""
    return np.asarray(_logprobs(params, jnp.asarray(tokens), adapter or {}, scale))


async def served_logprobs(http: SglangHttp, tokens: np.ndarray, adapter: str | None = None) -> np.ndarray:
    rid = new_rid()
    answer = await http.post("/generate", score_body(tokens, 1, rid, 0, adapter), timeout_s=PATIENCE_S)
    return parse_score(answer, tokens, 1, 0, ARCH.vocab_size, rid).logprobs


async def write_along(http: SglangHttp, tokens: int) -> None:
    """Returns when the server has written `tokens` tokens to a request of its own.

    However fast it is, what it was sent before has got about as many by then.
    """
    body = {
        "input_ids": TEXTS[0].tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    await http.post("/generate", orjson.dumps(body), timeout_s=PATIENCE_S)


async def differences(http: SglangHttp, params: Params, texts: Sequence[np.ndarray] = TEXTS) -> float:
    """The largest difference between the server's log-probs and the trainer's, nats."""
    served = [await served_logprobs(http, tokens) for tokens in texts]
    return max(float(np.abs(a - logprobs(params, t)).max()) for a, t in zip(served, texts, strict=True))


def with_servers(servers: Sequence[Any], main: Callable[..., Awaitable[Any]]) -> Any:
    """`main(http, ...)` with a connection to each server."""

    async def whole() -> Any:
        connections = [SglangHttp(Server(s.url, s.api_key, s.admin_key)) for s in servers]
        try:
            return await main(*connections)
        finally:
            await asyncio.gather(*(http.close() for http in connections))

    return asyncio.run(whole())


def load_base(servers: Sequence[Any], path: str) -> None:
    """They serve the checkpoint at `path` as version "0", whatever was done to them before.

    A run that ends while an engine is repaired, for one, leaves that engine paused.
    """

    async def load(http: SglangHttp) -> None:
        await http.command("/pause_generation", {"mode": "retract"}, timeout_s=PATIENCE_S)
        body = {"model_path": path, "weight_version": "0", "flush_cache": True}
        await http.command("/update_weights_from_disk", body, timeout_s=PATIENCE_S)
        await http.command("/continue_generation", {}, timeout_s=PATIENCE_S)

    async def main(*https: SglangHttp) -> None:
        await asyncio.gather(*map(load, https))

    with_servers(servers, main)
