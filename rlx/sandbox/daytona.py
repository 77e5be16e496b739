"""Sandboxes of a service with Daytona's HTTP API (daytona.io, or a server of one's own that speaks it).

Used of it: POST and DELETE /sandbox, and for each sandbox /toolbox/{id}/toolbox/{process/execute, files/upload,
files/download}. The service isolates a sandbox from all else; the limits inside are kept by `remote_runner`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox import remote_runner
from rlx.sandbox.base import Execution, Limit, SandboxError, WorkspaceError, check_command
from rlx.sandbox.files import parts

_HOME = "/tmp/rlx"
_RUNNER, _STDIN, _SNAPSHOT = f"{_HOME}/remote_runner.py", f"{_HOME}/stdin", f"{_HOME}/snapshot.tar"
_ANSWER_S = 30.0  # beyond the command's own time
_START_S = 300.0
_BUSY = (429, 502, 503, 504)  # statuses that a moment later may be others
_TRIES = 4
_LONGEST = 120_000  # bytes of a command: Linux gives a word of one 128 KiB


class DaytonaSandboxes:
    """The provider of kind "daytona"."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        key = os.environ.get(self._config.api_key)
        if not key:
            raise SandboxError(
                f"sandbox.kind = 'daytona' needs the service's key in the environment variable {self._config.api_key} "
                "(sandbox.api_key names it)"
            )
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"})
        try:
            sandbox = await self.open(self._config.limits)
            await sandbox.close()
        except BaseException:
            await self.close()
            raise

    async def open(self, limits: SandboxLimits) -> DaytonaSandbox:
        wanted = {
            "networkBlockAll": True,
            "autoStopInterval": 60,
            "autoDeleteInterval": 0,
            "labels": {"made-by": "rlx"},
        }
        made = json.loads(await self.request("POST", "sandbox", timeout_s=_START_S, tries=_TRIES, json=wanted))
        sandbox = DaytonaSandbox(self, made["id"], limits)
        try:
            await sandbox.wait_started(made.get("state", "started"))
            await sandbox.upload(_RUNNER, Path(remote_runner.__file__).read_bytes())
            await sandbox.list()  # makes the workspace
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def describe(self) -> dict[str, str]:
        return {
            "everything of this machine": f"programs run at {self._config.url}, not here",
            "network": "closed by the service (networkBlockAll)",
            "wall and CPU seconds, output, size of a file": "limited inside the sandbox",
            "memory, disk, processes": "what the service gives a sandbox; sandbox.limits does not change it",
        }

    async def request(
        self, method: str, path: str, *, timeout_s: float, tries: int = 1, most: int | None = None, **options: Any
    ) -> bytes:
        """The answer's body.

        Raises: SandboxError, FileNotFoundError for status 404, WorkspaceError for a body of more than `most` bytes.
        """
        url = f"{self._config.url.rstrip('/')}/{path}"
        for attempt in range(tries):
            async with self._answer(method, url, timeout_s, options) as answer:
                body = await _body(answer, most)
                if answer.status < 300:
                    return body
            if answer.status not in _BUSY or attempt == tries - 1:
                break
            await asyncio.sleep(0.2 * 2**attempt)
        if answer.status == 404:
            raise FileNotFoundError(f"{method} {url}: there is none")
        raise SandboxError(f"{method} {url} was answered with {answer.status}: {body[:300].decode(errors='replace')}")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, url: str, timeout_s: float, options: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise SandboxError("sandboxes were not started")
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, url, timeout=limit, **options) as answer:
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxError(f"{method} {url}: {type(error).__name__} {error}") from error


async def _body(answer: aiohttp.ClientResponse, most: int | None) -> bytes:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if most is not None and len(body) > most:
            raise WorkspaceError(f"the file has more than {most} bytes")
    return bytes(body)


class DaytonaSandbox:
    """See `rlx.sandbox.base.Sandbox`."""

    def __init__(self, service: DaytonaSandboxes, name: str, limits: SandboxLimits):
        self._service, self._id, self.limits = service, name, limits
        self._open = True

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Execution:
        self._check_open()
        check_command(command, env or {})
        if stdin:
            await self.upload(_STDIN, stdin)
        wall_s = min(self.limits.wall_s, self.limits.wall_s if timeout_s is None else timeout_s)
        request = {
            "command": list(command),
            "stdin": _STDIN if stdin else "",
            "env": dict(env or {}),
            "wall_s": wall_s,
            "limits": dataclasses.asdict(self.limits),
        }
        said = await self._act("run", request, wall_s)
        try:
            stdout, stderr = (base64.b64decode(said[name]) for name in ("stdout", "stderr"))
            stopped_by = Limit(said["stopped_by"]) if said["stopped_by"] else None
            return Execution(int(said["exit_code"]), stdout, stderr, float(said["seconds"]), stopped_by)
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"the sandbox answers {str(said)[:300]}, which is no end of a command") from error

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        await self.upload("/".join((remote_runner.WORKSPACE, *parts(path))), data)

    async def read(self, path: str) -> bytes:
        self._check_open()
        place = "/".join((remote_runner.WORKSPACE, *parts(path)))
        try:
            return await self._download(place, self.limits.file_bytes)
        except FileNotFoundError as error:  # which names the service
            raise FileNotFoundError(f"there is no file {path!r} in the workspace") from error

    async def list(self) -> list[str]:
        self._check_open()
        found: list[str] = await self._act("list", {}, 0.0)
        return found

    async def snapshot(self) -> bytes:
        self._check_open()
        await self._act("pack", {"to": _SNAPSHOT}, 0.0)
        return await self._download(_SNAPSHOT)

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        await self.upload(_SNAPSHOT, snapshot)
        await self._act("unpack", {"from": _SNAPSHOT}, 0.0)

    async def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(FileNotFoundError):  # the service has removed it itself
                path = f"sandbox/{self._id}"
                await self._service.request("DELETE", path, timeout_s=_ANSWER_S, tries=_TRIES, params={"force": "true"})

    async def wait_started(self, state: str) -> None:
        end = time.monotonic() + _START_S
        while state != "started":
            if state in ("error", "build_failed", "destroyed") or time.monotonic() > end:
                raise SandboxError(f"the service's sandbox {self._id} did not start: its state is {state!r}")
            await asyncio.sleep(0.5)
            said = await self._service.request("GET", f"sandbox/{self._id}", timeout_s=_ANSWER_S, tries=_TRIES)
            state = json.loads(said)["state"]

    async def upload(self, place: str, data: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("file", data, filename=place.rpartition("/")[2])
        path = f"toolbox/{self._id}/toolbox/files/upload"
        await self._service.request("POST", path, timeout_s=_ANSWER_S, params={"path": place}, data=form)

    async def _download(self, place: str, most: int | None = None) -> bytes:
        """Raises: FileNotFoundError, SandboxError, WorkspaceError for more than `most` bytes."""
        path, wanted = f"toolbox/{self._id}/toolbox/files/download", {"path": place}
        return await self._service.request("GET", path, timeout_s=_ANSWER_S, tries=_TRIES, most=most, params=wanted)

    async def _act(self, action: str, request: Mapping[str, Any], wall_s: float) -> Any:
        """What the runner answers."""
        asked = json.dumps(request)
        if len(asked) > _LONGEST:
            raise WorkspaceError("the command is too long: put what is long into a file")
        command = shlex.join(["python3", "-I", _RUNNER, action, asked])
        wanted = {"command": command, "timeout": int(wall_s + _ANSWER_S)}
        path = f"toolbox/{self._id}/toolbox/process/execute"
        said = json.loads(await self._service.request("POST", path, timeout_s=wall_s + 2 * _ANSWER_S, json=wanted))
        if said.get("exitCode") != 0:
            raise SandboxError(f"the runner in the sandbox failed: {str(said.get('result'))[-300:]}")
        try:
            return json.loads(said["result"])
        except ValueError as error:
            raise SandboxError(f"the runner in the sandbox answers {said['result'][:300]!r}") from error

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxError("the sandbox is closed")
