"""Two real SGLang servers of a tiny model, for the tests marked `sglang`: started once, both at the same time.

They need the environment .venv-sglang (`make .venv-sglang`), or another one named by RLX_SGLANG_PYTHON. The first test
that asks for a server waits for it; a server ends with pytest, also where that is killed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlx.rollout import servers
from tests import tiny_model
from tests.sglang.trainer import load_base

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("RLX_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
READY_S = 400.0  # two at once on two busy cores
ADMIN_KEY, API_KEY = "admin-key-of-the-tests", "key-of-the-tests"
LORA = ("--enable-lora", "--max-lora-rank=8", "--lora-target-modules=all", "--max-loras-per-batch=4")


@dataclasses.dataclass(frozen=True)
class LiveServer:
    """A server that runs; `process` is its main one."""

    url: str
    api_key: str  # generation, model_info
    admin_key: str  # weights, pauses, flushes
    model_path: str  # what it was started with: version 0
    process: servers.Server


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> str:
    """A Hugging Face directory: a Qwen3 of two layers with the tokenizer of `tests.tiny_tokenizer`, float32."""
    return tiny_model.build(tmp_path_factory.mktemp("sglang") / "model")


def server_spec(model_path: str, log: Path, *arguments: str, keys: bool = True) -> servers.ServerSpec:
    """A server of `model_path` on a free port of this machine, in float32 on one CPU thread."""
    given = {"RLX_API_KEY": API_KEY, "RLX_ADMIN_API_KEY": ADMIN_KEY} if keys else {}
    return servers.ServerSpec(
        python=PYTHON,
        arguments=(
            f"--model-path={model_path}",
            *servers.CPU_ARGUMENTS,
            "--dtype=float32",
            "--max-total-tokens=16384",
            "--weight-version=0",
            *arguments,
        ),
        port=servers.free_port(),
        log=log,
        environment={"OMP_NUM_THREADS": "1", **given},
    )


@pytest.fixture(scope="session")
def started(tiny_checkpoint, tmp_path_factory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Two servers with keys and room for LoRA adapters."""
    logs = tmp_path_factory.mktemp("servers")
    specs = [server_spec(tiny_checkpoint, logs / f"{i}.log", *LORA, "--lora-backend=torch_native") for i in range(2)]
    running = []
    try:
        for spec in specs:
            running.append(servers.start(spec))
        servers.wait_ready(running, READY_S)
        first, second = (LiveServer(s.url, API_KEY, ADMIN_KEY, tiny_checkpoint, s) for s in running)
        yield first, second
    finally:
        servers.stop(running)


@pytest.fixture(scope="module")
def two_servers(started, tiny_checkpoint) -> tuple[LiveServer, LiveServer]:
    """Both serve `tiny_checkpoint` as version "0", whatever the tests of other files have left them with."""
    load_base(started, tiny_checkpoint)
    return started


@pytest.fixture(scope="module")
def server(two_servers) -> LiveServer:
    """The first of the two."""
    return two_servers[0]
