"""Transport `distributed`: a broadcast over a torch process group, NCCL between GPUs or gloo between CPUs.

torch lives in the engines' environment, so the trainer's rank is a process of that environment, which maps the staged
files and broadcasts them as they lie. Each engine has a group, and a process, of its own: one that fails in the middle
takes no other with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlx.rollout.engine import EngineError
from rlx.rollout.sglang_http import SglangHttp
from rlx.sync.manifest import Entry
from rlx.sync.session import update_session
from rlx.sync.staging import Staged

SCRIPT = Path(__file__).resolve().parents[1] / "engine_env" / "broadcast_weights.py"
END_S = 30.0  # for a killed process to be gone, on a busy machine
LEAVE_S = 30.0  # for an engine to give up its end of a group
_GROUPS = itertools.count()


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """python: of the engines' environment, on this machine. ranks: of the engine."""

    python: str
    backend: str = "gloo"
    ranks: int = 1
    join_timeout_s: float = 120.0
    timeout_s: float = 600.0


class Distributed:
    """See `rlx.sync.bridge.Transport`. The group is made with the first delivery and serves all that follow."""

    def __init__(self, options: GroupOptions):
        self.options = options
        self._sender: _Sender | None = None
        self._http: SglangHttp | None = None  # of the engine in the group
        self._group = ""
        self._broken = False  # the group is not whole, or an end of it may wait for the other

    async def connect(self, http: SglangHttp) -> None:
        """Make the group, where there is none."""
        if self._sender is None:
            self._sender, self._http, self._broken = await _Sender.start(self.options.python), http, True
            await self._join(http, self._sender)
            self._broken = False

    async def deliver(self, http: SglangHttp, staged: Staged, files: Sequence[str]) -> None:
        sender, manifest = self._sender, staged.manifest
        if sender is None:
            raise EngineError(f"{http.server.url} was sent weights over a group that it has not joined", reason="load")
        self._broken = True
        async with update_session(http, self.options.timeout_s):
            for i, file in enumerate(files):
                last = i + 1 == len(files)
                entries = {name: manifest.tensors[name] for name in manifest.names(file)}
                command = {
                    "names": list(entries),
                    "dtypes": [manifest.dtype] * len(entries),
                    "shapes": [list(entry.shape) for entry in entries.values()],
                    "group_name": self._group,
                    "load_format": "flattened_bucket",
                    "flush_cache": last,
                    "weight_version": str(staged.version) if last else None,
                }
                call = http.command("/update_weights_from_distributed", command, timeout_s=self.options.timeout_s)
                await _both(call, sender.ask(**_stretch(staged.path / file, entries)))
        self._broken = False

    async def forget(self) -> None:
        """Leave the group, and have the engine give up its end, which it would keep for as long as it runs.

        An engine that waits for a broadcast is told by the connection's end. One that does not answer is left alone.
        """
        sender, http, self._sender = self._sender, self._http, None
        if sender is None or http is None:
            return
        try:
            if self._broken:
                await sender.close()
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    call = http.command("/destroy_weights_update_group", {"group_name": self._group}, timeout_s=LEAVE_S)
                    await (call if self._broken else _both(call, sender.ask(op="leave")))
        finally:
            await sender.close()

    async def _join(self, http: SglangHttp, sender: _Sender) -> None:
        options = self.options
        address = await asyncio.to_thread(own_address, http.server.url)
        self._group, port = f"rlx-{os.getpid()}-{next(_GROUPS)}", _free_port(address)
        world = 1 + options.ranks
        command = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": self._group,
            "backend": options.backend,
        }
        call = http.command("/init_weights_update_group", command, timeout_s=options.join_timeout_s)
        asked = sender.ask(
            op="join",
            group=self._group,
            backend=options.backend,
            address=address,
            port=port,
            world=world,
            seconds=options.join_timeout_s,
        )
        await _both(call, asked)


class _Sender:
    """The process that holds the trainer's rank."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    @classmethod
    async def start(cls, python: str) -> _Sender:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")}
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(python, str(SCRIPT), stdin=pipe, stdout=pipe, env=environment))

    async def ask(self, **command: Any) -> None:
        """Raises EngineError where the process fails or says that it did."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None  # both are pipes
        assert stdout is not None
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EngineError("the process that broadcasts weights has ended", reason="load") from error
        if not line:
            raise EngineError("the process that broadcasts weights has ended", reason="load")
        answer = json.loads(line)
        if not answer["ok"]:
            raise EngineError(f"broadcasting weights: {answer['error']}", reason="load")

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await asyncio.wait_for(self.process.wait(), END_S)


def _stretch(path: Path, entries: dict[str, Entry]) -> dict[str, Any]:
    """The tensors' bytes in their file, which lie one behind the other."""
    first = min(entry.offset for entry in entries.values())
    return {"op": "send", "path": str(path), "offset": first, "count": path.stat().st_size - first}


async def _both(call: Any, asked: Any) -> None:
    """Both ends of a collective; where one fails the other waits for ever, so it is given up."""
    tasks = [asyncio.ensure_future(call), asyncio.ensure_future(asked)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def own_address(url: str) -> str:
    """This machine's IPv4 address on the way to the server at `url`: a name of its own may be that of the loopback.

    Raises EngineError where there is no way.
    """
    host = urlsplit(url).hostname or ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, 9))  # any port: nothing is sent
            return str(way.getsockname()[0])
    except OSError as error:
        raise EngineError(f"there is no way from here to {host}: {error}", reason="load") from error


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
