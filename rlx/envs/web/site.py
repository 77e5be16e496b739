"""A site as its checks see it: the files of a workspace, or the Python server in it, which runs in a sandbox.

The server listens inside its sandbox, which has no network to the outside. A relay beside it takes requests from files
and puts the answers into files: all that a sandbox of any kind can do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import itertools
import json
import mimetypes
import secrets
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rlx.envs.web import relay
from rlx.envs.web.checks import Answer, Asked
from rlx.sandbox.base import Execution, Limit, PathError, Sandbox, SandboxError, WorkspaceError
from rlx.sandbox.pool import Sandboxes

SERVER = "server.py"  # a workspace that has it is served by it: `python3 server.py`, on 127.0.0.1:$PORT
PORT = 8000
START_S = 10.0  # for the server to listen: many times what one needs, since the machine may be busy
ANSWER_S = relay.ANSWER_S + 10.0  # for one answer to be there
SESSION_S = 120.0  # of the server, between two restarts
STOP_S = 5.0  # for the relay to see that it is over
POLL_S, POLL_SERVICE_S = 0.01, 0.25  # between two looks at the relay's files: of this machine, of a service
RELAY = Path(relay.__file__).read_text(encoding="utf-8")
FORWARDED = ("content-type", "accept", "cookie")  # headers of a request
DROPPED = ("content-length", "transfer-encoding", "connection", "date", "server")  # of an answer
GONE = Answer(502, {"Content-Type": "text/plain"}, b"the server does not answer")


class Files:
    """A site without a server: / is index.html."""

    def __init__(self, files: Mapping[str, bytes]):
        self._files = files

    async def respond(self, asked: Asked) -> Answer:
        path = asked.path.partition("?")[0].strip("/") or "index.html"
        if path not in self._files:
            return Answer(404, {"Content-Type": "text/plain"}, b"there is no such file")
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        kind += "; charset=utf-8" if kind.startswith("text/") or kind.endswith("javascript") else ""
        return Answer(200, {"Content-Type": kind}, self._files[path])

    async def restart(self) -> None:
        return None


class Served:
    """The server of a workspace. A server that does not start or answer gives status 502."""

    def __init__(self, sandbox: Sandbox, kind: str):
        self._sandbox = sandbox
        self._free_port = ["any"] if kind == "subprocess" else []
        self._poll_s = POLL_SERVICE_S if kind == "daytona" else POLL_S
        self._folder, self._numbers = "", itertools.count()
        self._running: asyncio.Task[Execution] | None = None  # None: the workspace has no room for the relay's files
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Returns when the server listens, or will not. Raises SandboxError where the sandbox is at fault."""
        # A name that a session could not prepare for, and the server before a restart neither.
        self._folder, self._numbers = f".relay-{secrets.token_hex(8)}", itertools.count()
        self._running = None
        if await self._put("begun", b""):
            command = ["python3", "-I", "-c", RELAY, str(PORT), self._folder, str(START_S), *self._free_port]
            self._running = asyncio.create_task(self._sandbox.run(command, timeout_s=SESSION_S))
            await self._listens(self._running)

    async def respond(self, asked: Asked) -> Answer:
        forwarded = {name: text for name, text in asked.headers.items() if name.lower() in FORWARDED}
        body = base64.b64encode(asked.body).decode()
        return await self._ask({"method": asked.method, "path": asked.path, "headers": forwarded, "body": body})

    async def restart(self) -> None:
        """The server ends, without a warning and with all it has started, and starts again with the files it left."""
        async with self._turn:
            await self.stop()
            await self.start()

    async def stop(self) -> None:
        """Raises what the sandbox raised while the server ran."""
        if (running := self._running) is None:
            return
        if not running.done() and await self._put("stop", b""):
            await asyncio.wait((running,), timeout=STOP_S)
        running.cancel()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.result()

    async def _listens(self, running: asyncio.Task[Execution]) -> None:
        while not running.done():
            with contextlib.suppress(FileNotFoundError):
                await self._read("up")
                return
            await asyncio.sleep(self._poll_s)
        execution = running.result()
        # Said before any of the server's code ran: whatever ended it afterwards, the server may have done it.
        if execution.stopped_by == Limit.WALL and not execution.stdout.startswith(relay.BEGUN.encode()):
            raise SandboxError(f"a sandbox began nothing in {SESSION_S:g} s")

    async def _ask(self, plain: Mapping[str, Any]) -> Answer:
        async with self._turn:
            number = next(self._numbers)
            asked = self._running is not None and await self._put(f"ask-{number}", json.dumps(plain).encode())
            # The second file says that the first one is there as a whole.
            went = asked and await self._put(f"go-{number}", b"")
            return await self._wait(f"said-{number}") if went else GONE

    async def _put(self, name: str, data: bytes) -> bool:
        """Whether the server has left room for a file. Raises SandboxError where the sandbox is at fault."""
        try:
            await self._sandbox.write(f"{self._folder}/{name}", data)
        except (PathError, WorkspaceError):
            return False
        return True

    async def _read(self, name: str) -> bytes:
        """b"" where the server has put something else in its place. Raises FileNotFoundError, SandboxError."""
        try:
            return await self._sandbox.read(f"{self._folder}/{name}")
        except (PathError, WorkspaceError):
            return b""

    async def _wait(self, name: str) -> Answer:
        assert self._running is not None
        end = asyncio.get_running_loop().time() + ANSWER_S
        while asyncio.get_running_loop().time() < end and not self._running.done():
            try:
                return _answer(await self._read(name))
            except FileNotFoundError:
                await asyncio.sleep(self._poll_s)
        return GONE


def _answer(said: bytes) -> Answer:
    try:
        answer = json.loads(said)
        headers = {name: str(text) for name, text in answer["headers"].items() if name.lower() not in DROPPED}
        status, body = int(answer["status"]), base64.b64decode(answer["body"])
    except (ValueError, KeyError, TypeError, AttributeError):  # not the relay's words: the server can write files, too
        return GONE
    return Answer(status, headers, body) if 100 <= status <= 599 else GONE


@contextlib.asynccontextmanager
async def site_of(snapshot: bytes, sandboxes: Sandboxes) -> AsyncIterator[Files | Served]:
    """The site in a snapshot of a workspace; a server gets a fresh sandbox of its own, and has started.

    Raises SandboxError where the sandbox fails.
    """
    files = unpacked(snapshot)
    if SERVER not in files:
        yield Files(files)
        return
    limits = sandboxes.config.limits
    limits = dataclasses.replace(limits, wall_s=max(limits.wall_s, SESSION_S))
    # A check waits for what its server says: the server must not wait for the commands of sessions.
    sandbox = await sandboxes.open(limits, at_once=True)
    try:
        await sandbox.restore(snapshot)
        served = Served(sandbox, sandboxes.config.kind)
        try:
            await served.start()
            yield served
        finally:
            await served.stop()
    finally:
        await sandbox.close()


def unpacked(snapshot: bytes) -> dict[str, bytes]:
    """The regular files of a snapshot."""
    with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as tar:
        found = ((member.name, tar.extractfile(member)) for member in tar if member.isreg())
        return {name: file.read() for name, file in found if file is not None}
