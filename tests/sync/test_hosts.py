"""A model that several processes hold together is staged as one that a single process holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from rlx.sync.staging import Staging
from tests import tiny_model

PROCESSES = 2
LIMIT_S = 600.0


@pytest.mark.slow
def test_shards_of_two_processes_are_gathered_bucket_by_bucket(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.sync.one_host", str(port)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    hosts = [
        subprocess.Popen(
            [*command, str(rank), str(PROCESSES), str(tmp_path / "hosts")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        said = [host.communicate(timeout=LIMIT_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    alone = Staging(tmp_path / "alone", tiny_model.ARCH, "float32", bucket_bytes=40_000).stage(tiny_model.params(2), 1)
    digests = [line.split()[1:] for output, _ in said for line in output.splitlines() if line.startswith("digests:")]
    assert digests == [sorted(alone.digests.values()), ["none"]]
