"""Servers as processes: ready, with keys, and gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlx.rollout import servers
from tests.sglang.conftest import PYTHON, server_spec
from tests.sglang.trainer import PATIENCE_S

pytestmark = pytest.mark.sglang


def get(url: str, key: str = "", *, empty: bool = False) -> dict | None:
    """The JSON of an answer of status 200, None where it is to have none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return None if empty else json.loads(answer.read())


def test_servers_are_ready_and_serve_the_model(two_servers):
    for live in two_servers:
        info = get(f"{live.url}/model_info", live.api_key)
        assert info["weight_version"] == "0"
        assert get(f"{live.url}/health_generate", live.api_key, empty=True) is None


def test_keys_are_asked_for_and_no_command_line_shows_them(server):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"{server.url}/model_info")
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert server.admin_key.encode() not in command
    assert b"--host" in command


def test_a_server_that_cannot_start_shows_its_own_last_words(tmp_path):
    started = servers.start(server_spec(str(tmp_path / "nowhere"), tmp_path / "log"))
    try:
        with pytest.raises(servers.ServerFailed, match=r"(?s)ended with status .*nowhere"):
            servers.wait_ready([started], PATIENCE_S)
    finally:
        servers.stop([started])
    assert not servers.group_exists(started.pid)


def test_no_process_outlives_the_one_that_started_it(tmp_path, tiny_checkpoint):
    """SIGKILL of whoever started it, as soon as the server has processes of its own."""
    spec = server_spec(tiny_checkpoint, tmp_path / "log")
    code = (
        "import sys, time, pathlib; from rlx.rollout import servers\n"
        f"spec = servers.ServerSpec({PYTHON!r}, {spec.arguments!r}, {spec.port}, pathlib.Path({str(spec.log)!r}))\n"
        "print(servers.start(spec).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    group = int(parent.stdout.readline())
    try:
        until = time.monotonic() + PATIENCE_S
        while members(group) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        assert members(group) >= 2
        parent.kill()
        parent.wait()
        until = time.monotonic() + PATIENCE_S  # a process that imports may not look for its parent for a while
        while servers.group_exists(group) and time.monotonic() < until:
            time.sleep(0.2)
        assert not servers.group_exists(group)
    finally:
        servers.signal_group(group, signal.SIGKILL)


def members(group: int) -> int:
    """Processes of a process group."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += os.getpgid(int(entry.name)) == group
            except ProcessLookupError:
                continue
    return found
