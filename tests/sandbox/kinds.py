"""Sandboxes of every kind, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from aiohttp.test_utils import TestServer

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox.pool import Sandboxes
from tests.sandbox.daytona_service import KEY, Service

KINDS = ("bubblewrap", "subprocess", "daytona")


LOCAL_FIRST = (*KINDS[:2], pytest.param("daytona", marks=pytest.mark.slow))


LIMITS = SandboxLimits(
    wall_s=20.0,
    cpu_s=10.0,
    cores=1.0,
    memory_bytes=128 << 20,
    processes=32,
    file_bytes=4 << 20,
    disk_bytes=8 << 20,
    files=200,
    output_bytes=100_000,
)


def config_of(kind: Literal["bubblewrap", "subprocess", "daytona"], directory: str) -> SandboxConfig:
    return SandboxConfig(
        kind=kind,
        max_open=4,
        max_running=2,
        directory=directory,
        read_only=(),
        url="",
        api_key="TEST_DAYTONA_KEY",
        limits=LIMITS,
    )


@contextlib.asynccontextmanager
async def pool(kind, tmp_path, monkeypatch, busy=0, **changes) -> AsyncIterator[Sandboxes]:
    config = dataclasses.replace(config_of(kind, str(tmp_path)), **changes)
    if kind != "daytona":
        async with Sandboxes(config) as sandboxes:
            yield sandboxes
        return
    monkeypatch.setenv("TEST_DAYTONA_KEY", KEY)
    service = Service(tmp_path, busy)
    async with TestServer(service.app()) as server:
        async with Sandboxes(dataclasses.replace(config, url=str(server.make_url("/api")))) as sandboxes:
            yield sandboxes
        assert service.sandboxes == {}
        assert service.made >= 1
