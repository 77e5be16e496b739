"""Servers as processes: started, awaited, started again, ended; by scripts that stand for servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.rollout import engine_state, servers
from rlx.rollout.engine_state import StateError
from rlx.rollout.servers import ServerFailed, ServerSpec
from rlx.rollout.supervisor import Group

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(servers, "LAUNCHER", FAKE)


def spec(tmp_path: Path, *arguments: str, name: str = "0") -> ServerSpec:
    return ServerSpec(sys.executable, arguments, servers.free_port(), tmp_path / f"{name}.log")


def test_a_group_is_ready_and_then_gone(tmp_path):
    with Group([spec(tmp_path, name=str(i)) for i in range(2)], 0.1) as group:
        servers.wait_ready(group.servers, 20.0)
        pids = [server.pid for server in group.servers]
        assert all(servers.group_exists(pid) for pid in pids)
    assert not any(servers.group_exists(pid) for pid in pids)


def test_what_cannot_start_says_why(tmp_path):
    with Group([spec(tmp_path, "--dtype=none")], 0.1) as group, pytest.raises(ServerFailed, match="no such dtype"):
        servers.wait_ready(group.servers, 20.0)


def test_waiting_ends_with_its_time_and_when_it_is_asked_to(tmp_path):
    def stop() -> None:
        raise InterruptedError

    with Group([spec(tmp_path)], 0.1) as group:
        os.kill(group.servers[0].pid, signal.SIGSTOP)
        with pytest.raises(ServerFailed, match=r"not ready in 0\.1 s"):
            servers.wait_ready(group.servers, 0.1)
        with pytest.raises(InterruptedError):
            servers.wait_ready(group.servers, 20.0, stop)
    assert not servers.group_exists(group.servers[0].pid)  # also one that was stopped


def test_a_missing_environment_and_a_taken_port_are_refused(tmp_path):
    with pytest.raises(ServerFailed, match=r"make \.venv-sglang"):
        servers.start(ServerSpec("/nowhere/python", (), 31000, tmp_path / "log"))
    with Group([spec(tmp_path)], 0.1) as group:
        servers.wait_ready(group.servers, 20.0)
        with pytest.raises(ServerFailed, match=f"port {group.specs[0].port} .* is taken"):
            servers.start(group.specs[0])


def test_a_server_that_ends_is_started_again(tmp_path):
    async def run(group: Group) -> list[str]:
        said: list[str] = []
        back = asyncio.Event()
        task = asyncio.create_task(group.keep(0, said.append, back.set))
        group.servers[0].process.kill()
        await asyncio.wait_for(back.wait(), 20)
        task.cancel()
        return said

    with Group([spec(tmp_path)], 0.1) as group:
        servers.wait_ready(group.servers, 20.0)
        first = group.servers[0].pid
        (said,) = asyncio.run(run(group))
        servers.wait_ready(group.servers, 20.0)
        assert group.servers[0].pid != first
        assert "ended with status -9" in said
        assert group.restarts == 1


def test_what_fails_around_a_restart_is_said_and_tried_again_beside_the_loop(tmp_path, monkeypatch):
    stopped_in: list[threading.Thread] = []
    stop = servers.stop

    def recorded(started: list[servers.Server]) -> None:
        stopped_in.append(threading.current_thread())
        stop(started)
        if len(stopped_in) == 1:
            raise OSError("a process that cannot be ended")

    async def run(group: Group) -> list[str]:
        said: list[str] = []
        back = asyncio.Event()

        def again() -> None:
            if group.restarts == 1:
                raise OSError("no space left on device")
            back.set()

        task = asyncio.create_task(group.keep(0, said.append, again))
        for _ in range(2):
            group.servers[0].process.kill()
            first = group.restarts
            while group.restarts == first and not task.done():
                await asyncio.sleep(0.05)
        await asyncio.wait_for(back.wait(), 20)
        task.cancel()
        return said

    monkeypatch.setattr(servers, "stop", recorded)
    with Group([spec(tmp_path)], 0.1) as group:
        said = asyncio.run(run(group))
    assert [line for line in said if not line.startswith("the server ended")] == [
        "a process that cannot be ended",
        "no space left on device",
    ]
    assert threading.main_thread() not in stopped_in[:2]


def test_a_number_that_was_given_back_gets_no_signal(tmp_path):
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        ended = SimpleNamespace(pid=other.pid, poll=lambda: 0, wait=lambda timeout_s: 0)
        servers.stop([servers.Server(spec(tmp_path), ended)])
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_processes_of_a_server_that_has_ended_are_ended(tmp_path):
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60'])"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    assert leader.wait() == 0
    assert servers.group_exists(leader.pid)
    servers.stop([servers.Server(spec(tmp_path), leader)])
    assert not servers.group_exists(leader.pid)


def test_nonsense_is_not_healthy():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert not servers.is_healthy(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_the_last_lines_of_a_long_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"{i} {'x' * 99}\n" for i in range(2000)) + "the end\n")
    assert servers.last_lines(log, 2) == f"1999 {'x' * 99}\nthe end"


def test_the_state_names_the_servers_and_ends_them(tmp_path):
    path = tmp_path / "engines.json"
    started = [servers.start(spec(tmp_path))]
    try:
        servers.wait_ready(started, 20.0)
        engine_state.write(path, started, None)
        state = engine_state.read(path)
        assert [s.url for s in state.servers] == [started[0].url]
        assert state.alive
        servers.stop(started)
        assert not state.alive
        engine_state.end(state)  # nothing is left to end
    finally:
        servers.stop(started)


def test_a_number_that_another_process_has_now_is_not_ended(tmp_path):
    own = engine_state.process(os.getpid())
    other = engine_state.Process(own.pid, own.started - 1)
    assert not other.alive
    engine_state.end(engine_state.EngineState(other, (engine_state.Started("http://a:1", "log", other),)))
    assert own.alive


def test_a_state_that_is_missing_or_damaged_says_what_to_do(tmp_path):
    with pytest.raises(StateError, match="rlx engines up"):
        engine_state.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"servers": 3}')
    with pytest.raises(StateError, match="remove it"):
        engine_state.read(tmp_path / "bad.json")
