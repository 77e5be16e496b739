"""SGLang servers as processes of this machine: started, awaited, ended without leaving one behind.

A server lives in the engines' own environment; `rlx/engine_env/sglang_serve.py` is what runs there. It leads a process
group, and every one of its processes ends with its parent, so that a killed trainer leaves none either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parents[1] / "engine_env" / "sglang_serve.py"
LOG_LINES = 20  # of a server that failed, in the message
LOG_BYTES = 1 << 16  # from the end of its log, in which they are looked for
STOP_S = 20.0  # for a server to end by itself after SIGTERM
POLL_S = 0.25
FIRST_PORT = 10_000
PORTS_TRIED = 100
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the connections of this machine, first and last

# What a server on a CPU needs beside its model; a later argument of the same name wins.
CPU_ARGUMENTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--sleep-on-idle",  # an idle scheduler otherwise polls, with a third of a core
    "--mem-fraction-static=0.5",
)


class ServerFailed(RuntimeError):
    """A server that ended, or was not ready in time; the message holds the last lines of its log."""


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """One server to start.

    environment: variables beside those of this process; RLX_API_KEY and RLX_ADMIN_API_KEY are the server's keys.
    attached: it ends when this process does.
    """

    python: str  # of the engines' environment
    arguments: tuple[str, ...]  # of sglang.launch_server, without host and port
    port: int
    log: Path
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attached: bool = True

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that was started; it may still be starting."""

    spec: ServerSpec
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def pid(self) -> int:
        """Of its main process, which is also its process group."""
        return self.process.pid


def start(spec: ServerSpec) -> Server:
    """Raises ServerFailed where the environment has no such Python, or the port is taken."""
    if not Path(spec.python).is_file():
        raise ServerFailed(
            f"{spec.python} does not exist: `make .venv-sglang` makes the environment of the engines on a machine "
            "without a GPU, `pip install -r requirements/sglang.txt` in one of its own that of a machine with one "
            "(docs/sglang.md)"
        )
    if not is_free(spec.host, spec.port):
        raise ServerFailed(f"port {spec.port} of {spec.host} is taken: stop what listens there, or give another port")
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, **spec.environment}
    environment["RLX_SERVE_PARENT"] = str(os.getpid()) if spec.attached else ""
    # Variables of the trainer's own environment would make the other Python look for packages in the wrong place.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    command = [spec.python, str(LAUNCHER), *spec.arguments, f"--host={spec.host}", f"--port={spec.port}"]
    with open(spec.log, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(spec, process)


def wait_ready(servers: Sequence[Server], timeout_s: float, check: Callable[[], None] | None = None) -> None:
    """Until all answer /health with 200. Raises ServerFailed for the first that ended, or that takes too long, and
    what `check`, which is called now and then, raises."""
    until, waiting = time.monotonic() + timeout_s, list(servers)
    while waiting:
        if check is not None:
            check()
        for server in waiting:
            if (status := server.process.poll()) is not None:
                raise ServerFailed(
                    f"the server at {server.url} ended with status {status} while it started{_log(server)}"
                )
        waiting = [server for server in waiting if not is_healthy(server.url)]
        if waiting and time.monotonic() > until:
            raise ServerFailed(f"the server at {waiting[0].url} was not ready in {timeout_s:g} s{_log(waiting[0])}")
        if waiting:
            time.sleep(POLL_S)


def stop(servers: Sequence[Server]) -> None:
    """SIGTERM to each, SIGKILL to what is left of their process groups after a while. Returns when all are gone.

    Raises ServerFailed where a process cannot be ended.
    """
    for server in servers:
        if server.process.poll() is None:
            signal_group(server.pid, signal.SIGCONT)  # a stopped process would not see the other one
            server.process.terminate()
    until = time.monotonic() + STOP_S
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.0, until - time.monotonic()))
    until = time.monotonic() + STOP_S
    for server in servers:
        _end_group(server, until)


def _end_group(server: Server, until: float) -> None:
    """SIGKILL to the server's processes. Raises ServerFailed where one is left at `until`, of time.monotonic()."""
    while server.process.poll() is None or (_is_left(server.pid) and group_exists(server.pid)):
        signal_group(server.pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise ServerFailed(f"processes of the server at {server.url} do not end: `kill -9 -- -{server.pid}`")
        time.sleep(0.05)


def _is_left(group: int) -> bool:
    """Is the number of a group, whose first process was waited for, still its own? Given away, a process has it."""
    return not Path(f"/proc/{group}").exists()


def signal_group(pid: int, kind: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, kind)


def group_exists(group: int) -> bool:
    """Is a process of the group left that runs?"""
    return any(_runs_in(stat, group) for stat in Path("/proc").glob("[0-9]*/stat"))


def _runs_in(stat: Path, group: int) -> bool:
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just ended
    return fields[0] != "Z" and int(fields[2]) == group


def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens on now, and that no connection of this machine is given while a server starts.

    Raises ServerFailed where there seems to be none.
    """
    given = int(LOCAL_PORTS.read_text().split()[0])
    ports = range(FIRST_PORT, max(given, FIRST_PORT + PORTS_TRIED))
    for port in random.SystemRandom().sample(ports, PORTS_TRIED):
        if is_free(host, port):
            return port
    raise ServerFailed(f"{PORTS_TRIED} ports of {host} between {ports[0]} and {ports[-1]} are taken; name free ones")


def last_lines(log: Path, count: int = LOG_LINES) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])


def _log(server: Server) -> str:
    return f"; the last lines of {server.spec.log}:\n{last_lines(server.spec.log)}"
