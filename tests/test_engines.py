"""`rlx engines`: up, status, down; with scripts that stand for servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from rlx import cli, engines
from rlx.config.errors import ConfigError
from rlx.rollout import engine_state, servers
from rlx.rollout.engine_state import EngineState, StateError
from rlx.rollout.servers import ServerFailed
from tests.rollout.test_supervisor import FAKE

RECIPE = """
from configs import base, quickstart_sglang

def get_config():
    c = quickstart_sglang.get_config()
    c.model.path = {model!r}
    c.inference.python = {python!r}
    c.producer.backoff_s = 0.1
    return c
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(servers, "LAUNCHER", FAKE)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.format(model=str(tmp_path), python=sys.executable))
    return path


def run(*words: str | Path) -> int:
    return engines.main([str(word) for word in words])


def test_up_status_down(recipe, tmp_path, capsys):
    state = tmp_path / "state" / "engines.json"
    assert run("up", f"--config={recipe}", "--config.inference.count=2", "--detach", "--json", "--state", state) == 0
    told = json.loads(capsys.readouterr().out)
    try:
        assert len(told["addresses"]) == 2
        assert run("status", "--json", "--state", state) == 0
        found = json.loads(capsys.readouterr().out)["servers"]
        assert [s["url"] for s in found] == told["addresses"]
        assert all(s["healthy"] and s["version"] == "7" for s in found)
        with pytest.raises(StateError, match="down"):
            run("up", f"--config={recipe}", "--state", state)
        os.kill(told["pids"][0], signal.SIGKILL)
        wait(lambda: None if servers.group_exists(told["pids"][0]) else True)
        assert run("status", "--state", state) == 1
        assert "ended" in capsys.readouterr().out
    finally:
        assert run("down", "--state", state) == 0
    assert not any(servers.group_exists(pid) for pid in told["pids"])
    assert not state.exists()


def test_up_stays_until_a_signal_and_starts_again_what_ends(recipe, tmp_path, capsys, monkeypatch):
    state, pids, ready = tmp_path / "engines.json", [], threading.Event()
    monkeypatch.setattr(engines, "_announce", lambda *_: ready.set())

    def act() -> None:
        assert ready.wait(300)
        (server,) = engine_state.read(state).servers
        url = server.url
        pids.append(pid_at(url))
        os.kill(pids[0], signal.SIGKILL)
        pids.append(wait(lambda: another(url, pids[0])))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act)
    thread.start()
    assert run("up", f"--config={recipe}", "--state", state) == 0
    thread.join()
    assert len(pids) == 2
    assert not any(servers.group_exists(pid) for pid in pids)
    assert not state.exists()
    assert "status -9" in capsys.readouterr().err


def test_a_server_that_does_not_end_is_told(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        started = engine_state.Started("http://127.0.0.1:9", "log", engine_state.process(process.pid))
        with monkeypatch.context() as patch:
            patch.setattr(servers, "signal_group", lambda pid, kind: None)
            with pytest.raises(ServerFailed, match=f"kill -9 -- -{process.pid}`"):
                engine_state.end(EngineState(None, (started,)), patience_s=0.1)
        engine_state.end(EngineState(None, (started,)))


def wait(found):
    until = time.monotonic() + 300
    while (value := found()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def pid_at(url: str) -> int:
    with urllib.request.urlopen(f"{url}/model_info", timeout=5) as answer:
        return json.loads(answer.read())["pid"]


def another(url: str, pid: int) -> int | None:
    return found if servers.is_healthy(url) and (found := pid_at(url)) != pid else None


def test_what_does_not_start_is_told_and_leaves_nothing(recipe, tmp_path):
    state = tmp_path / "engines.json"
    argument = "--config.inference.arguments=('--dtype=none',)"
    with pytest.raises(ServerFailed, match="no such dtype"):
        run("up", f"--config={recipe}", argument, "--detach", "--state", state)
    assert not state.exists()


def test_wrong_words_are_refused(recipe, tmp_path, capsys):
    embedded = ("engine.kind=local", "inference.count=0", "inference.radix_cache=auto", "producer.engine_admission=0")
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        run("up", f"--config={recipe}", *(f"--config.{change}" for change in embedded))
    with pytest.raises(ValueError, match="takes no such option"):
        run("down", "--config=x.py", "--state", tmp_path / "none.json")
    assert cli.run("engines", ["status", f"--state={tmp_path / 'none.json'}"]) == 1
    assert "rlx engines up" in capsys.readouterr().err
