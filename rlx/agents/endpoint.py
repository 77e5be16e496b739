"""An OpenAI-compatible server in front of sessions: /v1/chat/completions, /v1/models.

A request belongs to the session of its path, /sessions/ID/v1/..., or else of its API key. Who answers is the session's
business: `rlx.agents.recorder` asks an engine, `rlx.agents.outside` the producer of a training run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from rlx.agents.openai import (
    ChatRequest,
    Reply,
    RequestInvalid,
    Sampling,
    completion,
    error_body,
    parse_request,
    stream_chunks,
)
from rlx.rollout.engine import EngineError, RequestRefused

LARGEST_BODY = 1 << 26  # bytes of a request


class Answerer(Protocol):
    async def answer(self, request: ChatRequest) -> Reply:
        """Raises RequestInvalid, RequestRefused (the request is at fault) and EngineError."""
        ...


class Endpoint:
    """A context manager: it serves from entering to leaving.

    Args:
      model: the name that /v1/models gives and answers carry.
      newcomer: makes the session of an API key or a path that is not known yet; without it such a request is refused.
    """

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        newcomer: Callable[[str], Answerer] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        self._model, self._sampling, self._newcomer = model, sampling, newcomer
        self._host, self._port = host, port
        self._sessions: dict[str, Answerer] = {}
        self._busy: set[str] = set()
        self._app = web.Application(client_max_size=LARGEST_BODY)
        for prefix in ("", "/sessions/{session}"):
            self._app.router.add_post(f"{prefix}/v1/chat/completions", self._complete)
            self._app.router.add_get(f"{prefix}/v1/models", self._models)
        self._runner = web.AppRunner(self._app)

    @property
    def router(self) -> web.UrlDispatcher:
        """For further routes; before it is entered."""
        return self._app.router

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def base_url(self, session: str) -> str:
        """OPENAI_BASE_URL of a session's client."""
        return f"{self.url}/sessions/{session}/v1"

    def open(self, answerer: Answerer) -> str:
        """A new session: its id, which is its API key as well."""
        session = secrets.token_hex(16)
        self._sessions[session] = answerer
        return session

    def close(self, session: str) -> None:
        """Its requests are refused from here on."""
        self._sessions.pop(session, None)

    async def __aenter__(self) -> Endpoint:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------------------- handlers

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlx"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _json(request)
            asked = parse_request(body, self._sampling)
            name = _session_of(request)
            reply = await self._one_at_a_time(name, asked)
        except RequestInvalid as error:
            return web.json_response(error_body(error), status=error.status)
        except RequestRefused as error:
            refused = RequestInvalid(str(error), "context_length_exceeded")
            return web.json_response(error_body(refused), status=400)
        except EngineError as error:
            failed = RequestInvalid(f"the engine failed: {error}", f"engine_{error.reason}")
            return web.json_response(error_body(failed), status=503)
        identifier = f"chatcmpl-{secrets.token_hex(12)}"
        if not asked.stream:
            return web.json_response(completion(reply, identifier, self._model))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in stream_chunks(reply, identifier, self._model):
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _one_at_a_time(self, name: str, asked: ChatRequest) -> Reply:
        answerer = self._sessions.get(name)
        if answerer is None:
            if self._newcomer is None:
                raise RequestInvalid(f"there is no session {name!r}, or it has ended", "invalid_api_key", 401)
            answerer = self._sessions[name] = self._newcomer(name)
        if name in self._busy:
            raise RequestInvalid(
                "a request of this session is being answered: a session is one conversation, give each its own key",
                "session_busy",
                409,
            )
        self._busy.add(name)
        try:
            return await answerer.answer(asked)
        finally:
            self._busy.discard(name)


async def _json(request: web.Request) -> object:
    try:
        return await request.json()
    except (ValueError, asyncio.IncompleteReadError) as error:
        raise RequestInvalid(f"the body is not JSON: {error}") from error


def _session_of(request: web.Request) -> str:
    """By path, else by key."""
    named = request.match_info.get("session")
    if named:
        return named
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise RequestInvalid(
            "give an API key (Authorization: Bearer KEY): it names the session", "invalid_api_key", 401
        )
    return key.strip()
