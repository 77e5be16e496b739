"""What talking to SGLang servers costs the trainer's process: CPU for 1,000 requests with heads, bytes for each token.

    python -m bench.sglang_client [--requests 200] [--tokens 256] [--head 128] [--repeats 3]

Another process answers at once with ready bodies as SGLang 0.5.23 writes them (ids below 151,936, log-probs as JSON or
base64), so that what is measured is the client: sending, receiving, parsing, checking. Four variants, interleaved;
medians. CPU is that of this process and of its parsing process, all threads; the answering process is left out.

    base64      heads as float32 and int32 arrays in base64; what the client asks for
    worker      the same, parsed in another process
    flat        heads as flat lists of JSON numbers
    nested      heads as lists of [log-prob, id, text], what the server does unless asked otherwise
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from rlx.rollout.engine import Request
from rlx.rollout.servers import free_port
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server
from rlx.rollout.sglang_requests import HeadForm, Limits

VOCAB, PROMPT, AT_ONCE = 151_936, 128, 64
RID = "0" * 32
VARIANTS: dict[str, tuple[HeadForm, int]] = {  # the form, and from how many bytes another process parses
    "base64": ("base64", 1 << 40),
    "worker": ("base64", 0),
    "flat": ("flat", 1 << 40),
    "nested": ("nested", 1 << 40),
}


def bodies(tokens: int, head: int) -> dict[HeadForm, bytes]:
    """One answer of `tokens` tokens in each form."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(VOCAB, head, replace=False) for _ in range(tokens)]).astype(np.int32)
    scores = -np.sort(-rng.normal(0, 2, (tokens, head)), axis=1)
    logprobs = (scores - np.log(np.exp(scores).sum(1, keepdims=True)) - 0.05).astype(np.float32)
    meta: dict[str, Any] = {
        "id": RID,
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": PROMPT,
        "weight_version": "0",
        "num_retractions": 0,
        "output_token_logprobs": [[float(p[0]), int(t[0]), None] for p, t in zip(logprobs, ids, strict=True)],
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
        "e2e_latency": 0.19670552400202723,
    }
    key = "output_top_logprobs"
    flat = {f"{key}_shape": [tokens, head], f"{key}_null_prefix": 0}
    forms: dict[HeadForm, dict[str, Any]] = {
        "base64": flat
        | {f"{key}_val_flat_b64": _b64(logprobs), f"{key}_val_flat_b64_dtype": "float32"}
        | {f"{key}_idx_flat_b64": _b64(ids), f"{key}_idx_flat_b64_dtype": "int32"},
        "flat": flat | {f"{key}_val_flat": _numbers(logprobs.ravel()), f"{key}_idx_flat": ids.ravel().tolist()},
        "nested": {
            key: [
                [[value, int(token), None] for value, token in zip(_numbers(values), row, strict=True)]
                for values, row in zip(logprobs, ids, strict=True)
            ]
        },
    }
    text = "word " * tokens
    return {
        form: orjson.dumps({"text": text, "output_ids": ids[:, 0].tolist(), "meta_info": meta | heads})
        for form, heads in forms.items()
    }


def _b64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _numbers(array: np.ndarray) -> list[float]:
    """As the server writes them: doubles of float32 values, all their digits."""
    return [float(x) for x in array]


def serve(port: int, tokens: int, head: int) -> None:
    """Answer until this process is ended."""
    ready = bodies(tokens, head)

    async def generate(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        flat, encoded = "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"
        form: HeadForm = "nested" if not asked.get(flat) else "base64" if asked[encoded] else "flat"
        body = ready[form].replace(RID.encode(), asked["rid"].encode(), 1)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def child_seconds() -> float:
    """CPU of this process's parsing processes, from /proc; the answering process is not one of them."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == os.getpid() and b"rlx.envs.workers" in command:
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


async def measure(url: str, variant: str, count: int, tokens: int, head: int) -> dict[str, float]:
    """CPU seconds and bytes of `count` requests."""
    form, threshold = VARIANTS[variant]
    limits = Limits(VOCAB, 1 << 20, head, (), form)
    options = SglangOptions(limits, admission=AT_ONCE, in_flight=AT_ONCE, parse_processes=1, parse_bytes=threshold)
    engine = SglangEngine(Server(url), options, _nothing)
    prompt = np.arange(PROMPT, dtype=np.int32) + 1000
    await engine.generate(Request("warm", prompt, (0,), tokens, 1.0))
    start = engine.http.sent_bytes, engine.http.received_bytes, time.process_time(), child_seconds(), time.monotonic()
    await asyncio.gather(*(engine.generate(Request(f"{i}", prompt, (i,), tokens, 1.0)) for i in range(count)))
    ends = engine.http.sent_bytes, engine.http.received_bytes, time.process_time(), child_seconds(), time.monotonic()
    await engine.close()
    sent, received, own, other, wall = (b - a for a, b in zip(start, ends, strict=True))
    return {"sent": sent, "received": received, "own": own, "other": other, "wall": wall}


async def _nothing(*_: Any) -> None:
    raise AssertionError("nothing is loaded here")


def report(variant: str, runs: list[dict[str, float]], count: int, tokens: int) -> str:
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    cpu, written = middle["own"] + middle["other"], count * tokens
    return (
        f"| {variant} | {1000 * cpu / count:.2f} | {1000 * middle['own'] / count:.2f} | {1e6 * cpu / written:.1f} "
        f"| {middle['received'] / written:,.0f} | {middle['sent'] / count:,.0f} | {written / middle['wall']:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    count, tokens, head = arguments.requests, arguments.tokens, arguments.head
    if arguments.serve:
        serve(arguments.serve, tokens, head)
        return
    port = free_port()
    command = ["-m", "bench.sglang_client", "--serve", str(port), "--tokens", str(tokens), "--head", str(head)]
    answering = subprocess.Popen([sys.executable, *command])
    try:
        wait_for(port)
        url = f"http://127.0.0.1:{port}"
        runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.repeats):
            for variant, found in runs.items():
                found.append(asyncio.run(measure(url, variant, count, tokens, head)))
    finally:
        answering.terminate()
        answering.wait()
    print(f"{count} requests of {tokens} tokens, heads of {head}, {AT_ONCE} at once; medians of {arguments.repeats}\n")
    print("| variant | CPU s / 1,000 requests | in process | µs / token | bytes / token | sent / request | tokens/s |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for variant, found in runs.items():
        print(report(variant, found, count, tokens))
    cost = {v: statistics.median(r["own"] + r["other"] for r in found) for v, found in runs.items()}
    print(f"\nnested / base64: {cost['nested'] / cost['base64']:.1f} x the CPU")


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing answers on port {port}")


if __name__ == "__main__":
    main()
