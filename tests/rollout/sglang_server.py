"""A local HTTP server that answers as SGLang does, or wrongly where it is told to: `async with Server() as s`."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

from rlx.rollout.engine import Request
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server as Address
from rlx.rollout.sglang_requests import Limits

VOCAB, HEAD, STOP = 50, 4, 7
Handler = Callable[[dict[str, Any]], Awaitable[web.Response]]


def flat(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def answer(body: dict[str, Any], written: int | None = None, end: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a well-behaved server answers to POST /generate: `written` tokens under version "3"."""
    rng = np.random.default_rng(body["sampling_params"]["sampling_seed"])
    count = body["sampling_params"]["max_new_tokens"] if written is None else written
    scores = rng.normal(size=(count, VOCAB)).astype(np.float32)
    scores[:, STOP] = -9.0
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    order = np.argsort(-logprobs, axis=-1)[:, :HEAD].astype(np.int32)
    tokens = order[:, 1]
    head = np.take_along_axis(logprobs, order, -1)
    meta = {
        "id": body["rid"],
        "finish_reason": end or {"type": "length", "length": count},
        "prompt_tokens": len(body["input_ids"]),
        "weight_version": "3",
        "output_token_logprobs": [[float(logprobs[i, t]), int(t), None] for i, t in enumerate(tokens)],
        "output_top_logprobs_val_flat_b64": flat(head),
        "output_top_logprobs_idx_flat_b64": flat(order),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
        "output_top_logprobs_shape": [count, HEAD],
        "weight_versions": [{"version": "3", "start": 0, "end": count}],
    }
    return {"output_ids": tokens.tolist(), "meta_info": meta}


@dataclasses.dataclass
class Server:
    """`generate` is what it does with a request; `seen` are the (path, key, body) that came."""

    generate: Handler | None = None
    seen: list[tuple[str, str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    aborted: set[str] = dataclasses.field(default_factory=set)
    url: str = ""

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append((request.path, request.headers.get("Authorization", ""), body))
        if request.path == "/abort_request":
            self.aborted.add(body["rid"])
            return web.Response()
        return await self.generate(body) if self.generate else web.json_response(answer(body))

    async def __aenter__(self) -> Server:
        app = web.Application()
        app.router.add_post("/generate", self._handle)
        app.router.add_post("/abort_request", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.seen]

    async def until(self, path: str, count: int) -> None:
        while self.paths().count(path) < count:
            await asyncio.sleep(0.005)


async def no_load(*_: Any) -> None:
    raise AssertionError("nothing is to be loaded here")


def engine(url: str, **changes: Any) -> SglangEngine:
    limits = Limits(VOCAB, 64, HEAD, (STOP,))
    options = {"limits": limits, "request_timeout_s": 10.0, "parse_processes": 0} | changes
    return SglangEngine(Address(url, "user", "admin", backoff_s=0.01), SglangOptions(**options), no_load, version=3)


def ask(samples: int = 1, prompt: tuple[int, ...] = (1, 2, 3), new: int = 5, temperature: float = 1.0) -> Request:
    return Request("ask", np.array(prompt, np.int32), tuple(range(samples)), new, temperature)
