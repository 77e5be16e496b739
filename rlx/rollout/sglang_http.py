"""HTTP to one SGLang server: keys, time limits, and errors by what they say of the server and of the request.

A request is sent again only where it cannot have had an effect: the connection was never made, or the server said that
it took nothing in (its queue is full). What was lost on the way may have run; whoever asked decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from rlx.rollout.engine import EngineError

if TYPE_CHECKING:
    import aiohttp

OVERLOADED = (429, 503)
UNAUTHORIZED = (401, 403)
# Below uvicorn's 5 s: a connection that the server is just closing must not be picked for a request.
KEEPALIVE_S = 3.0
READ_BUFFER = 1 << 20  # bytes; an answer with heads has megabytes
LONGEST_BACKOFF_S = 5.0
SAID = 500  # characters of a server's message that are repeated


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and how patient to be with it.

    api_key: for generation and what only looks; admin_key: for weights, pauses and flushes, "" = the same.
    retries: times that a connection is tried again; an overloaded server is asked until the request's time is up.
    backoff_s: before the first of them; doubles with each.
    """

    url: str
    api_key: str = ""
    admin_key: str = ""
    connect_timeout_s: float = 10.0
    retries: int = 2
    backoff_s: float = 0.25

    def headers(self, admin: bool) -> dict[str, str]:
        key = (self.admin_key or self.api_key) if admin else self.api_key
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


class HttpError(EngineError):
    """What a server answered that is not 200. `status` is HTTP's, `said` the server's own words."""

    def __init__(self, message: str, *, reason: str, status: int, said: str):
        super().__init__(message, reason=reason)
        self.status, self.said = status, said


class Unreachable(EngineError):
    """There is no connection, so nothing was asked."""


class SglangHttp:
    """One server's connections. Used from one event loop; `close` it there."""

    def __init__(self, server: Server):
        self.server = server
        self.sent_bytes = self.received_bytes = self.retried = 0  # bodies; since the start
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, timeout_s: float = 30.0, admin: bool = False) -> Any:
        """The parsed answer. Looking has no effect, so a lost answer is asked for, too. Raises what `post` does."""
        return _parsed(path, await self._patiently("GET", path, None, timeout_s, admin, ("connection",)))

    async def post(self, path: str, body: bytes, *, timeout_s: float, admin: bool = False) -> bytes:
        """The answer's body.

        Raises:
          HttpError: another status than 200, as reason "unauthorized", "overloaded", "bad_request" or "status_NNN".
          Unreachable: no connection.
          EngineError: "connection" was lost, or "timeout"; the request may have run.
        """
        return await self._patiently("POST", path, body, timeout_s, admin, ())

    async def _patiently(
        self, method: str, path: str, body: bytes | None, timeout_s: float, admin: bool, lost: tuple[str, ...]
    ) -> bytes:
        """`_send`, again where that is safe: up to `retries` times without a connection, all the time while overloaded.

        lost: reasons for which it is safe though the request may have arrived.
        """
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + timeout_s, 0
        while True:
            try:
                return await self._send(method, path, body, deadline - loop.time(), admin)
            except EngineError as error:
                unheard = isinstance(error, Unreachable) or error.reason in lost
                if not (error.reason == "overloaded" or (unheard and attempt < self.server.retries)):
                    raise
                # Each waits a time of its own: what a full queue turned away must not come back all at once.
                wait = min(self.server.backoff_s * 2**attempt, LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0)
                if loop.time() + wait >= deadline:
                    raise
            attempt += 1
            self.retried += 1
            await asyncio.sleep(wait)

    async def command(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 60.0) -> Any:
        """POST with the admin key: the parsed answer, {} where there is none.

        Raises what `post` does, and EngineError ("refused") where the server says `"success": false`.
        """
        raw = await self.post(path, orjson.dumps(body), timeout_s=timeout_s, admin=True)
        try:
            answer = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError:
            answer = raw.decode(errors="replace")  # /flush_cache answers in words
        if isinstance(answer, dict) and answer.get("success") is False:
            said = answer.get("message") or answer.get("error_message") or answer
            raise EngineError(f"{self.server.url}{path}: {said}", reason="refused")
        return answer

    async def close(self) -> None:
        """For good: what comes late, as the abort of a request that was given up, raises EngineError ("closed")."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"{self.server.url}: nothing is asked of it any more", reason="closed")
        import aiohttp  # here: a tenth of a second that runs without servers do not wait for

        if self._session is None or self._session.closed:
            # How many run at once is the caller's business: a limit here would be a queue that nobody sees.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=READ_BUFFER)
        return self._session

    async def _send(self, method: str, path: str, body: bytes | None, timeout_s: float, admin: bool) -> bytes:
        import aiohttp

        url = self.server.url.rstrip("/") + path
        if timeout_s <= 0:  # woken late from the wait before it; aiohttp would take it for no limit at all
            raise EngineError(f"{url}: its time was up before it was sent", reason="timeout")
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.server.connect_timeout_s)
        try:
            async with self._open().request(
                method, url, data=body, headers=self.server.headers(admin), timeout=timeout
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{url}: no connection ({error})", reason="connection") from error
        except TimeoutError as error:
            raise EngineError(f"{url}: no answer within {timeout_s:g} s", reason="timeout") from error
        except aiohttp.InvalidURL as error:
            raise ValueError(f"{url!r} is no address of a server: http://HOST:PORT is") from error
        except aiohttp.ClientError as error:
            lost = f"{url}: the connection was lost ({type(error).__name__}: {error})"
            raise EngineError(lost, reason="connection") from error
        self.sent_bytes += len(body or b"")
        self.received_bytes += len(answer)
        if response.status != 200:
            raise _error(url, response.status, answer)
        return answer


def _error(url: str, status: int, answer: bytes) -> HttpError:
    said = _words(answer)
    if status in UNAUTHORIZED:
        reason, advice = "unauthorized", "; give the API key and the admin key that the server was started with"
    elif status in OVERLOADED:
        reason, advice = "overloaded", ""
    else:
        reason, advice = ("bad_request" if status == 400 else f"status_{status}"), ""
    return HttpError(f"{url} answered {status}: {said}{advice}", reason=reason, status=status, said=said)


def _words(answer: bytes) -> str:
    """The message in an error's body, however it is wrapped."""
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer.decode(errors="replace")[:SAID]
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            break
        value = inner
    return str(value)[:SAID]


def _parsed(path: str, answer: bytes) -> Any:
    try:
        return orjson.loads(answer) if answer else {}
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{path}: the answer is not JSON ({error})", reason="malformed") from error
