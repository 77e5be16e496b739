"""A stand-in for Daytona's HTTP API, with a directory for each sandbox instead of a machine."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

from aiohttp import web

KEY = "the-key"
HOME = "/tmp/rlx"


class Service:
    """Paths under /tmp/rlx are under a directory of the sandbox; its programs are told by the text of the command."""

    def __init__(self, root: Path, busy: int = 0):
        self.root, self.busy = root, busy  # answers 503 so many times
        self.sandboxes: dict[str, dict] = {}
        self.made = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._checked], client_max_size=16 << 20)
        app.router.add_post("/api/sandbox", self._make)
        app.router.add_get("/api/sandbox/{id}", self._state)
        app.router.add_delete("/api/sandbox/{id}", self._remove)
        app.router.add_post("/api/toolbox/{id}/toolbox/process/execute", self._execute)
        app.router.add_post("/api/toolbox/{id}/toolbox/files/upload", self._upload)
        app.router.add_get("/api/toolbox/{id}/toolbox/files/download", self._download)
        return app

    @web.middleware
    async def _checked(self, request, handler):
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized(text="no valid key")
        if "id" in request.match_info and request.match_info["id"] not in self.sandboxes:
            raise web.HTTPNotFound(text="no such sandbox")
        return await handler(request)

    async def _make(self, request):
        if self.busy:
            self.busy -= 1
            raise web.HTTPServiceUnavailable(text="no room now")
        name = uuid.uuid4().hex
        (self.root / name).mkdir()
        self.sandboxes[name] = {"id": name, "state": "creating", "asked": await request.json()}
        self.made += 1
        return web.json_response(self.sandboxes[name])

    async def _state(self, request):
        sandbox = self.sandboxes[request.match_info["id"]]
        sandbox["state"] = "started"
        return web.json_response(sandbox)

    async def _remove(self, request):
        del self.sandboxes[request.match_info["id"]]
        return web.Response()

    def _place(self, request, path: str) -> Path:
        return Path(path.replace(HOME, str(self.root / request.match_info["id"])))

    async def _execute(self, request):
        asked = await request.json()
        command = asked["command"].replace(HOME, str(self.root / request.match_info["id"]))
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(process.communicate(), asked["timeout"])
        return web.json_response({"exitCode": process.returncode, "result": said.decode(errors="replace")})

    async def _upload(self, request):
        place = self._place(request, request.query["path"])
        place.parent.mkdir(parents=True, exist_ok=True)
        data = (await request.post())["file"].file.read()
        if place.name == "remote_runner.py":
            data = data.replace(HOME.encode(), str(self.root / request.match_info["id"]).encode())
        place.write_bytes(data)
        return web.Response(text=json.dumps({}))

    async def _download(self, request):
        place = self._place(request, request.query["path"])
        if not place.is_file():
            raise web.HTTPNotFound(text="no such file")
        return web.Response(body=place.read_bytes())
