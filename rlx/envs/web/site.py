"""A site as its checks see it: the files of a workspace, or the Python server in it, which runs in a sandbox.

The server listens inside its sandbox, which has no network to the outside. A relay beside it takes requests from files
and puts the answers into files: all that a sandbox of any kind can do.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
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
from rlx.sandbox.base import Execution, PathError, Sandbox, SandboxError
from rlx.sandbox.pool import Sandboxes

SERVER = "server.py"  # a workspace that has it is served by it: `python3 server.py`, on 127.0.0.1:$PORT
PORT = 8000
START_S = 5.0  # for the server to listen
ANSWER_S = 5.0  # for one answer
SESSION_S = 30.0  # of one check
POLL_S = 0.01
RELAY = Path(relay.__file__).read_text(encoding="utf-8")
FORWARDED = ("content-type", "accept", "cookie")  # headers of a request
DROPPED = ("content-length", "transfer-encoding", "connection", "date", "server")  # of an answer
FULL = (errno.ENOSPC, errno.EDQUOT)
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

    def __init__(self, sandbox: Sandbox, folder: str, running: asyncio.Task[Execution]):
        self._sandbox, self._folder, self._running = sandbox, folder, running
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()

    async def respond(self, asked: Asked) -> Answer:
        forwarded = {name: text for name, text in asked.headers.items() if name.lower() in FORWARDED}
        body = base64.b64encode(asked.body).decode()
        return await self._ask({"method": asked.method, "path": asked.path, "headers": forwarded, "body": body})

    async def restart(self) -> None:
        """The server ends, without a warning, and starts again with the files that it has left."""
        await self._ask({"restart": True, "method": "GET", "path": "/", "headers": {}, "body": ""})

    async def _ask(self, plain: Mapping[str, Any]) -> Answer:
        async with self._turn:
            number = next(self._numbers)
            asked = await self._put(f"ask-{number}", json.dumps(plain).encode())
            # The second file says that the first one is there as a whole.
            went = asked and await self._put(f"go-{number}", b"")
            return await self._wait(f"{self._folder}/said-{number}") if went else GONE

    async def _put(self, name: str, data: bytes) -> bool:
        """Whether the server has left room for a file. Raises SandboxError where the sandbox is at fault."""
        try:
            await self._sandbox.write(f"{self._folder}/{name}", data)
        except PathError:
            return False
        except SandboxError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
                return False
            raise
        return True

    async def _wait(self, path: str) -> Answer:
        end = asyncio.get_running_loop().time() + START_S + ANSWER_S
        while asyncio.get_running_loop().time() < end and not self._running.done():
            try:
                return _answer(await self._sandbox.read(path))
            except FileNotFoundError:
                await asyncio.sleep(POLL_S)
            except PathError:  # the server has put something else in its place
                return GONE
        return GONE

    async def stop(self) -> None:
        if not await self._put("stop", b""):
            self._running.cancel()
        await asyncio.wait((self._running,))
        if not self._running.cancelled():
            self._running.result()


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
    """The site in a snapshot of a workspace; a server gets a fresh sandbox of its own.

    Raises SandboxError where the sandbox fails.
    """
    files = unpacked(snapshot)
    if SERVER not in files:
        yield Files(files)
        return
    sandbox = await sandboxes.open()
    try:
        await sandbox.restore(snapshot)
        folder = f".relay-{secrets.token_hex(8)}"  # a name that a session could not prepare for
        await sandbox.write(f"{folder}/begun", b"")
        free_port = ["any"] if sandboxes.config.kind == "subprocess" else []
        command = ["python3", "-I", "-c", RELAY, str(PORT), folder, str(START_S), *free_port]
        served = Served(sandbox, folder, asyncio.create_task(sandbox.run(command, timeout_s=SESSION_S)))
        try:
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
