"""Which servers `rlx engines up` has started, in a file that `status` and `down` read."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlx.rollout import servers
from rlx.rollout.servers import Server, ServerFailed


class StateError(ValueError):
    """A state file that is not there, or not to be understood; or one of servers that still run."""


@dataclasses.dataclass(frozen=True)
class Process:
    """One that may have ended meanwhile, and whose number another one may have since."""

    pid: int
    started: int  # clock ticks since the machine's start

    @property
    def alive(self) -> bool:
        return started(self.pid) == self.started


@dataclasses.dataclass(frozen=True)
class Started:
    """A server; its process leads a group."""

    url: str
    log: str
    process: Process


@dataclasses.dataclass(frozen=True)
class EngineState:
    keeper: Process | None  # starts servers again that end; None: nobody does
    servers: tuple[Started, ...]

    @property
    def alive(self) -> bool:
        return any(server.process.alive for server in self.servers) or (self.keeper is not None and self.keeper.alive)


def started(pid: int) -> int | None:
    """When the process of this number was started; None where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def process(pid: int) -> Process:
    """Raises ProcessLookupError where there is none."""
    since = started(pid)
    if since is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, since)


def write(path: Path, group: Sequence[Server], keeper: Process | None) -> None:
    found = [Started(s.url, str(s.spec.log.resolve()), process(s.pid)) for s in group if started(s.pid) is not None]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(EngineState(keeper, tuple(found))), indent=2) + "\n")
    part.replace(path)


def read(path: Path) -> EngineState:
    """Raises StateError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        keeper = None if content["keeper"] is None else Process(**content["keeper"])
        return EngineState(
            keeper, tuple(Started(s["url"], s["log"], Process(**s["process"])) for s in content["servers"])
        )
    except FileNotFoundError as error:
        raise StateError(
            f"{path} does not exist: `rlx engines up` writes it, or name another one by --state"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is no state of `rlx engines` ({error!r}); remove it") from error


def end(state: EngineState, patience_s: float = servers.STOP_S) -> None:
    """Ends all servers, with whoever would start them again first. Returns when no process is left.

    Raises ServerFailed where some do not end.
    """
    keeper = state.keeper
    if keeper is not None and keeper.alive:
        os.kill(keeper.pid, signal.SIGTERM)
        if not _wait(lambda: keeper.alive, 2 * patience_s):
            os.kill(keeper.pid, signal.SIGKILL)
    alive = [server.process for server in state.servers if server.process.alive]
    for running in alive:
        servers.signal_group(running.pid, signal.SIGCONT)
        servers.signal_group(running.pid, signal.SIGTERM)
    _wait(lambda: any(p.alive for p in alive), patience_s)
    for running in alive:
        servers.signal_group(running.pid, signal.SIGKILL)
    if not _wait(lambda: any(servers.group_exists(p.pid) for p in alive), patience_s):
        left = " ".join(f"-{p.pid}" for p in alive if servers.group_exists(p.pid))
        raise ServerFailed(f"processes of servers do not end: `kill -9 -- {left}`, then `rlx engines down` once more")


def _wait(holds: Callable[[], bool], patience_s: float) -> bool:
    """Has it ceased to hold in time?"""
    until = time.monotonic() + patience_s
    while still := holds():
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return not still
