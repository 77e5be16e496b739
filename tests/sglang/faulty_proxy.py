"""Stands before a server and passes everything through, until it is told to do worse."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import TracebackType

import aiohttp
from aiohttp import web

LASTS_S = 2.0
PASSED_ON = ("Authorization", "Content-Type")


class FaultyProxy:
    """fail: "cut" closes every connection, "errors" answers 500, "full" 503 as a full queue does, "nonsense" 200 with
    something else. Of generation alone, but "cut". With several targets it is a router: each request to the next one.
    A fault ends by itself, `LASTS_S` after it was met. A context manager; it runs in a thread of its own."""

    def __init__(self, *targets: str):
        self.targets, self.faults = itertools.cycle(targets), list[str]()
        self._mode, self._met = "through", 0.0

    def fail(self, mode: str) -> None:
        self.faults.append(mode)
        self._mode, self._met = mode, 0.0

    @property
    def waits(self) -> bool:
        """For a request to meet a fault."""
        return self._mode != "through" and not self._met

    @property
    def mode(self) -> str:
        over = self._met and time.monotonic() - self._met > LASTS_S
        return "through" if over else self._mode

    def __enter__(self) -> FaultyProxy:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as self._session:
            started.set()
            await self._over.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        generates = request.path == "/generate"
        if self.mode == "cut":
            return self._cut(request)
        if generates and self.mode in ("errors", "full"):
            status = 500 if self._meet() == "errors" else 503
            return web.json_response({"error": {"message": "not now"}}, status=status)
        if generates and self.mode == "nonsense":
            self._meet()
            return web.json_response({"output_ids": [1, 2, 3], "meta_info": {}})
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = next(self.targets) + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            content = await answer.read()
        if self.mode == "cut":
            return self._cut(request)
        return web.Response(body=content, status=answer.status, content_type=answer.content_type)

    def _meet(self) -> str:
        self._met = self._met or time.monotonic()
        return self._mode

    def _cut(self, request: web.Request) -> web.Response:
        self._meet()
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
