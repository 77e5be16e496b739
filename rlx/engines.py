"""SGLang servers of this machine: start them, look at them, end them.

    rlx engines up --config=configs/quickstart_sglang.py             until Ctrl-C; a server that ends is started again
    rlx engines up --config=... --detach                             returns when they are ready; `down` ends them
    rlx engines up --config=... --config.inference.count=4 --config.inference.tensor_parallel=2
    rlx engines status [--json]
    rlx engines down

`up` starts config.inference.count servers of config.model.path with the arguments of config.inference. A run on this or
another machine uses them by config.inference.addresses. --state=FILE names the file in which `up` leaves what `status`
and `down` read (runs/engines.json).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.rollout import engine_state, servers
from rlx.rollout.engine_state import EngineState, Started, StateError
from rlx.rollout.server_options import server_specs
from rlx.rollout.servers import Server, ServerFailed
from rlx.rollout.supervisor import Group

WORDS = ("up", "status", "down")
STATE = "runs/engines.json"


def up(config: Config, state: Path, *, detach: bool, as_json: bool) -> None:
    """Starts the servers; returns when they are ready (detach), or were ended by a signal.

    Raises ConfigError, ServerFailed, StateError where servers of the same state file still run.
    """
    if config.engine.kind != "sglang" or not config.inference.count:
        raise ConfigError(
            f"config.engine.kind = {config.engine.kind!r}, config.inference.count = {config.inference.count}: "
            "`rlx engines up` starts count SGLang servers; set 'sglang' and at least 1"
        )
    if state.exists() and engine_state.read(state).alive:
        raise StateError(f"the servers of {state} run: `rlx engines down` ends them, --state names another file")
    logs = state.parent / f"{state.stem}-logs"
    specs = server_specs(config, logs, attached=not detach)
    if detach:
        started: list[Server] = []
        try:
            started += [servers.start(spec) for spec in specs]
            servers.wait_ready(started, config.inference.ready_timeout_s)
        except BaseException:
            servers.stop(started)
            raise
        engine_state.write(state, started, None)
        _announce(started, state, as_json)
        return
    with contextlib.suppress(asyncio.CancelledError), Group(specs, config.producer.backoff_s) as group:
        asyncio.run(_keep(config, group, state, as_json))
    state.unlink(missing_ok=True)


async def _keep(config: Config, group: Group, state: Path, as_json: bool) -> None:
    """Until a signal."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None  # a coroutine runs in a task
    for kind in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(kind, me.cancel)

    def check() -> None:
        if me.cancelling():
            raise ServerFailed("ended while the servers started")  # in the thread that waits for them

    own = engine_state.process(os.getpid())
    engine_state.write(state, group.servers, own)
    await asyncio.to_thread(servers.wait_ready, group.servers, config.inference.ready_timeout_s, check)
    _announce(group.servers, state, as_json)

    def ended(said: str) -> None:
        print(said, file=sys.stderr, flush=True)

    def again() -> None:
        engine_state.write(state, group.servers, own)

    await asyncio.gather(*(group.keep(i, ended, again) for i in range(len(group.specs))))


def _announce(group: Sequence[Server], state: Path, as_json: bool) -> None:
    addresses = [address(s.spec.host, s.spec.port) for s in group]
    if as_json:
        print(json.dumps({"addresses": addresses, "pids": [s.pid for s in group], "state": str(state)}), flush=True)
        return
    for server, url in zip(group, addresses, strict=True):
        print(f"{url}   process {server.pid}, log {server.spec.log}")
    listed = ",".join(repr(url) for url in addresses)
    print(f'a run uses them with --config.inference.count=0 --config.inference.addresses="({listed},)"', flush=True)


def address(host: str, port: int) -> str:
    """As a run on another machine names it."""
    return f"http://{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"


def status(state: EngineState, key: str) -> list[dict[str, Any]]:
    """What each server of a state is now."""
    return [_status(server, key) for server in state.servers]


def _status(server: Started, key: str) -> dict[str, Any]:
    alive = server.process.alive
    found = {"url": server.url, "pid": server.process.pid, "log": server.log, "alive": alive, "healthy": False}
    if alive and servers.is_healthy(server.url):
        found["healthy"] = True
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{server.url}/model_info", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                info = json.loads(answer.read())
        except OSError as error:
            return found | {"error": str(error)}
        found |= {"version": info["weight_version"], "model": info["model_path"]}
    return found


def _print_status(found: list[dict[str, Any]]) -> None:
    for server in found:
        what = "healthy" if server["healthy"] else "busy or starting" if server["alive"] else "ended"
        serves = f", serves version {server['version']}" if "version" in server else ""
        failed = f", {server['error']}" if "error" in server else ""
        print(f"{server['url']}   process {server['pid']}: {what}{serves}{failed}")
        if not server["alive"] and Path(server["log"]).is_file():
            print(f"  the last lines of {server['log']}:\n{servers.last_lines(Path(server['log']))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlx engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--state", type=Path, default=Path(STATE), help=f"({STATE})")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--detach", action="store_true", help="up: return when the servers are ready")
    parser.add_argument("--key-variable", default="", help="status: environment variable with the API key")
    return parser


def main(argv: list[str] | None = None) -> int:
    """`rlx engines`: 0; of `status` 1 where a server is not healthy."""
    arguments, recipe = _parser().parse_known_args(argv)
    if arguments.word == "up":
        config = config_or_exit(["rlx engines up", *recipe], flags.FlagValues(), __doc__ or "")
        up(config, arguments.state, detach=arguments.detach, as_json=arguments.json)
        return 0
    if recipe:
        raise ValueError(f"{recipe[0]!r}: `rlx engines {arguments.word}` takes no such option")
    state = engine_state.read(arguments.state)
    if arguments.word == "down":
        engine_state.end(state)
        arguments.state.unlink(missing_ok=True)
        ended = [dataclasses.asdict(server) for server in state.servers]
        print(json.dumps({"ended": ended}) if arguments.json else f"{len(ended)} servers have ended")
        return 0
    found = status(state, os.environ[arguments.key_variable] if arguments.key_variable else "")
    if arguments.json:
        print(json.dumps({"servers": found}))
    else:
        _print_status(found)
    return 0 if found and all(server["healthy"] for server in found) else 1


if __name__ == "__main__":
    sys.exit(cli.run("engines", sys.argv[1:]))
