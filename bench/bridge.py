"""What a publication to SGLang servers costs: seconds by transport, and how long engines generate nothing.

    python -m bench.bridge [--layers 10] [--rounds 3] [--json FILE]

Needs the engines' environment (`make .venv-sglang`). One real server of a random model of about 500 MB in float32 is
published to by each transport, in turns with what bounds it: a copy and an fsync of as many bytes for `disk`, one gloo
broadcast of a 500 MB buffer between two processes for `distributed`. The server's own load, which no transport saves,
is that of `disk`, whose request names a directory. Then two tiny servers generate while versions are published to them
in each mode; an engine is idle while it is paused, or has no request because it takes none. Medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlx.metrics.ledger import Ledger
from rlx.models.description import Architecture
from rlx.models.hf import save_params
from rlx.models.presets import dense
from rlx.models.spec import count_parameters, init_params
from rlx.rollout import servers
from rlx.rollout.engine import Completion, Request
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server, SglangHttp
from rlx.rollout.sglang_requests import Limits
from rlx.sync.bridge import Bridge, Link, Transport
from rlx.sync.disk import Disk
from rlx.sync.distributed import Distributed, GroupOptions
from rlx.sync.publisher import Mode, Publisher
from rlx.sync.staging import Staging
from rlx.sync.tensor import Tensor

PYTHON = os.environ.get("RLX_SGLANG_PYTHON", str(Path(__file__).resolve().parents[1] / ".venv-sglang/bin/python"))
BROADCAST_BYTES = 500 * 10**6
MODES: tuple[Mode, ...] = ("barrier", "refresh", "drain")
CONTEXT = 512

# Both ranks of one broadcast by torch alone; prints rank 0's seconds, from a barrier to the end of the last rank.
BROADCAST = """
import sys, time, torch, torch.distributed as dist
rank, port, count = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
buffer = torch.ones(count, dtype=torch.uint8)
for _ in range(2):
    dist.barrier(); began = time.monotonic(); dist.broadcast(buffer, 0); dist.barrier()
if rank == 0: print(time.monotonic() - began)
dist.destroy_process_group()
"""


def model(layers: int, hidden: int, vocabulary: int) -> Architecture:
    return dense(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=max(1, hidden // 128),
        head_dim=64,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tied=True,
        max_positions=CONTEXT,
    )


def spec(directory: Path, name: str, arch: Architecture) -> servers.ServerSpec:
    save_params(directory / name, arch, init_params(arch, jax.random.key(0)), "float32")
    arguments = (
        f"--model-path={directory / name}",
        *servers.CPU_ARGUMENTS,
        "--dtype=float32",
        "--max-total-tokens=16384",
        "--skip-tokenizer-init",
    )
    log = directory / f"{name}.log"
    return servers.ServerSpec(PYTHON, arguments, servers.free_port(), log, environment={"OMP_NUM_THREADS": "1"})


# --------------------------------------------------------------------------------------------------------- transports


def copy_and_sync(source: Path, target: Path, version: int) -> float:
    """Seconds of `cp` of the staged files and an fsync of each copy.

    The copy before goes when this one is there, as staged versions do: memory for pages that was just given back is
    several times as fast as memory that a virtual machine has to ask for, and both sides must get the same.
    """
    before, target = target / str(version - 1), target / str(version)
    began = time.monotonic()
    target.mkdir(parents=True)
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.monotonic() - began
    if before.exists():
        shutil.rmtree(before)
    return seconds


def broadcast(count: int) -> float:
    """Seconds of one gloo broadcast of `count` bytes, warm."""
    port = servers.free_port()
    command = [PYTHON, "-c", BROADCAST]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(count)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said, _ = ranks[0].communicate(timeout=120)
    ranks[1].wait(60)
    return float(said)


async def publish_by(
    transports: dict[str, Callable[[], Transport]], url: str, arch: Architecture, directory: Path, rounds: int
) -> dict[str, Any]:
    """Seconds of staging, delivery and check by transport, interleaved with the two bounds."""
    http = SglangHttp(Server(url))
    bridges = {
        name: Bridge(Staging(directory / name, arch, "float32", durable=name == "disk"), make, keep=1)
        for name, make in transports.items()
    }
    links = {name: bridge.link() for name, bridge in bridges.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"stage": [], "deliver": [], "check": []} for name in transports}
    bounds: dict[str, list[float]] = {"cp_fsync": [], "broadcast_500MB": []}
    for version in range(1, rounds + 2):  # the first one warms up: groups, connections, compiled programs
        params = init_params(arch, jax.random.key(version))
        jax.block_until_ready(params)
        for name, link in links.items():
            await link(http, params, version)
            assert link.seconds is not None
            assert link.served is not None
            times = {"stage": bridges[name].stage_seconds, "deliver": link.seconds.deliver, "check": link.seconds.check}
            if version > 1:
                for what, seconds in times.items():
                    found[name][what].append(seconds)
            if name == "disk":
                copied = await asyncio.to_thread(copy_and_sync, link.served.path, directory / "copy", version)
                bounds["cp_fsync"] += [copied] if version > 1 else []
        if version > 1:
            bounds["broadcast_500MB"].append(await asyncio.to_thread(broadcast, BROADCAST_BYTES))
    for bridge in bridges.values():
        await bridge.close()
    await http.close()
    medians = {name: {k: statistics.median(v) for k, v in times.items()} for name, times in found.items()}
    return medians | {"bounds": {k: statistics.median(v) for k, v in bounds.items()}}


def ratios(times: dict[str, Any], nbytes: int) -> dict[str, float]:
    """Of a publication to its bound, with the server's own load and without."""
    bounds, load = times["bounds"], times["disk"]["deliver"]
    sent = bounds["broadcast_500MB"] * nbytes / BROADCAST_BYTES
    disk, group = times["disk"]["stage"], times["distributed"]["deliver"]
    return {
        "disk_stage_to_cp_fsync": disk / bounds["cp_fsync"],
        "disk_whole_to_cp_fsync": (disk + load) / bounds["cp_fsync"],
        "distributed_deliver_to_broadcast": group / sent,
        "distributed_without_load_to_broadcast": max(group - load, 0.0) / sent,
        "tensor_deliver_to_broadcast": times["tensor"]["deliver"] / sent,
    }


# ---------------------------------------------------------------------------------------------------------- idle time


class Watched(SglangEngine):
    """Counts the requests that run in it."""

    running = 0

    async def generate(self, request: Request) -> list[Completion]:
        self.running += 1
        try:
            return await super().generate(request)
        finally:
            self.running -= 1


async def idle_seconds(urls: list[str], arch: Architecture, directory: Path, mode: Mode, rounds: int) -> float:
    """Seconds for which an engine generated nothing, a publication and an engine, while requests never run out."""
    bridge = Bridge(Staging(directory / mode, arch, "float32"), Disk)
    links: list[Link] = [bridge.link() for _ in urls]
    options = SglangOptions(Limits(arch.vocab_size, CONTEXT), admission=16)
    engines = [Watched(Server(url), options, link) for url, link in zip(urls, links, strict=True)]
    params = [init_params(arch, jax.random.key(version)) for version in range(rounds + 1)]
    for engine in engines:
        await engine.load(params[0], 0)
    rng, idle = np.random.default_rng(0), 0.0
    async with Fleet(engines, FleetOptions(http_admission=16), params[0], 0, Ledger()) as fleet:
        publisher = Publisher(fleet, mode, bridge.prepare)

        async def ask_for_ever(number: int) -> None:
            for i in itertools.count():
                prompt = rng.integers(0, arch.vocab_size, 8, dtype=np.int32)
                await fleet.generate(Request(f"{number}-{i}", prompt, (i,), int(rng.integers(16, 128)), 1.0))

        askers = [asyncio.create_task(ask_for_ever(n)) for n in range(40)]
        await asyncio.sleep(1.0)
        for version in range(1, rounds + 1):
            publishing = asyncio.create_task(_settled(publisher, params[version], version))
            at = time.monotonic()
            while not publishing.done():
                await asyncio.sleep(0.002)
                now = time.monotonic()
                idle += (now - at) * sum(engine.running == 0 for engine in engines)
                at = now
            await publishing
            if mode == "refresh":  # requests run in it, and wait
                idle += sum(link.seconds.idle for link in links if link.seconds is not None)
            await asyncio.sleep(1.0)
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
    for engine in engines:
        await engine.close()
    await bridge.close()
    return idle / rounds / len(engines)


async def _settled(publisher: Publisher, params: Any, version: int) -> None:
    await publisher.publish(params, version)
    await publisher.settled()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    large, small = model(options.layers, 1024, 16384), model(2, 64, 512)
    transports: dict[str, Callable[[], Transport]] = {
        "disk": Disk,
        "tensor": Tensor,
        "distributed": lambda: Distributed(GroupOptions(PYTHON)),
    }
    nbytes = 4 * count_parameters(large)
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        directory = Path(temporary)
        specs = [spec(directory, "large", large), *(spec(directory, f"small{i}", small) for i in range(2))]
        started = [servers.start(s) for s in specs]
        try:
            servers.wait_ready(started, 400.0)
            times = asyncio.run(publish_by(transports, started[0].url, large, directory, options.rounds))
            urls = [s.url for s in started[1:]]
            idle = {m: asyncio.run(idle_seconds(urls, small, directory, m, options.rounds)) for m in MODES}
        finally:
            servers.stop(started)
    result = {"megabytes": nbytes / 1e6, "seconds": times, "ratios": ratios(times, nbytes), "idle_seconds": idle}
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def show(result: dict[str, Any]) -> None:
    print(f"{result['megabytes']:.0f} MB in float32, one server of one CPU thread; seconds, medians")
    print(f"{'transport':>12} {'stage':>8} {'deliver':>8} {'check':>8}")
    for name in ("disk", "tensor", "distributed"):
        print(f"{name:>12} " + " ".join(f"{result['seconds'][name][k]:8.2f}" for k in ("stage", "deliver", "check")))
    for name, seconds in result["seconds"]["bounds"].items():
        print(f"{name:>22} {seconds:6.2f}")
    for name, ratio in result["ratios"].items():
        print(f"{name:>40} {ratio:5.2f} x")
    for mode, seconds in result["idle_seconds"].items():
        print(f"idle per publication and engine, {mode:>8}: {1000 * seconds:6.0f} ms")


if __name__ == "__main__":
    main()
