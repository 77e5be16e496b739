"""An SGLang server as an engine: token ids in, token ids with log-probs, heads and versions out, over HTTP.

Every sample of a request is a POST of its own: each has its own seed, is aborted by its own id, and is sent again alone
where the server's queue was full.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused
from rlx.rollout.limits import abandon
from rlx.rollout.sglang_http import HttpError, Server, SglangHttp
from rlx.rollout.sglang_parsing import Parser
from rlx.rollout.sglang_requests import Limits, check_generate, check_score, generate_body, new_rid, score_body
from rlx.rollout.sglang_responses import Asked, Scored, parse_score

ABORT_S = 3.0  # for an aborted sample to come back with what it has; a fleet waits 5 s
_NO_PROMPT = np.empty(0, np.int32)

Partial = tuple[Completion | None, ...]


class Loader(Protocol):
    """Brings weights to one server."""

    async def __call__(self, http: SglangHttp, weights: Any, version: int, /) -> str | None:
        """Make the server serve `weights` as `version` and return the LoRA adapter that requests must name; None where
        the base weights changed. The prefix cache is flushed, running requests go on. Raises EngineError."""
        ...


@dataclasses.dataclass(frozen=True)
class SglangOptions:
    """What one engine is asked to do.

    parse_processes, parse_bytes: see `Parser`.
    """

    limits: Limits
    admission: int = 64
    request_timeout_s: float = 1800.0
    in_flight: int = 0  # samples sent and not yet parsed, 0 = 2 x admission; more of them wait here
    parse_processes: int = 1
    parse_bytes: int = 8 << 20


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server says of itself."""

    label: str  # of its weights
    model_path: str
    model_type: str
    input_limit: int  # tokens; a prompt must have fewer
    sglang: str  # its version
    settings: Mapping[str, Any]  # its arguments, as it resolved them, and `launch_command`


class SglangEngine:
    """See the module's docstring, and `rlx.rollout.engine.Replica`. Use it from one event loop, and close it there.

    Args:
      load: how new weights come to the server.
      version, adapter: what it serves now.
    """

    def __init__(
        self, server: Server, options: SglangOptions, load: Loader, *, version: int = 0, adapter: str | None = None
    ):
        self.name, self.admission = server.url, options.admission
        self.http, self.options, self.version = SglangHttp(server), options, version
        self._adapter, self._load = adapter, load
        self._parser = Parser(options.parse_processes, options.parse_bytes)
        self._sent: set[str] = set()  # ids of samples that the server may be at work on
        self._aborted: set[str] = set()
        self._slots = asyncio.Semaphore(options.in_flight or 2 * options.admission)

    async def generate(self, request: Request) -> list[Completion]:
        """See `rlx.rollout.engine.Engine`. Cancelled, or when a sample of several fails, the server is told to abort
        the others, and what had been written comes as EngineError.partial."""
        limits = self.options.limits
        check_generate(request, limits)
        rids = [new_rid() for _ in request.seeds]
        samples = [asyncio.create_task(self._sample(request, i, rid)) for i, rid in enumerate(rids)]
        try:
            await asyncio.wait(samples, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as cancelled:
            partial = await self._abort(samples, rids)
            if not any(partial):
                raise
            said = f"request {request.id} was cancelled"
            raise EngineError(said, reason="cancelled", partial=partial) from cancelled
        ended = (s for s in samples if s.done() and not s.cancelled())
        failed = next((e for s in ended if (e := s.exception()) is not None), None)
        if failed is None:
            return [sample.result() for sample in samples]
        partial = await self._abort(samples, rids)
        if isinstance(failed, EngineError) and not isinstance(failed, RequestRefused):
            raise EngineError(str(failed), reason=failed.reason, partial=partial) from failed
        raise failed

    async def score(self, sequences: Sequence[np.ndarray], start: int, head_size: int = 0) -> list[Scored]:
        """What the server's policy says, at temperature 1, of each sequence's tokens from index `start` >= 1 on.

        Raises RequestRefused for what cannot be scored, EngineError where the server fails.
        """
        for tokens in sequences:
            check_score(tokens, start, self.options.limits)
        try:
            async with asyncio.TaskGroup() as running:
                jobs = [running.create_task(self._score(tokens, start, head_size)) for tokens in sequences]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [job.result() for job in jobs]

    async def load(self, weights: Any, version: int, /) -> None:
        """See `rlx.rollout.engine.Replica`."""
        self._adapter = await self._load(self.http, weights, version)
        self.version = version

    async def served(self) -> Served:
        """What the server says of itself. Raises EngineError where it is no SGLang server."""
        model = await self.http.get("/model_info")
        server = await self.http.get("/server_info")
        try:
            return Served(
                label=str(model["weight_version"]),
                model_path=model["model_path"],
                model_type=model["model_type"],
                input_limit=server["max_req_input_len"],
                sglang=server["version"],
                settings=server,
            )
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self.name} does not answer as an SGLang server: {error!r}", reason="malformed"
            ) from error

    async def checksums(self) -> Mapping[str, str]:
        """A checksum of every tensor that it serves, by the served (fused) name; of rank 0."""
        answer = await self.http.command("/weights_checker", {"action": "checksum"}, timeout_s=600.0)
        return answer["ranks"][0]["checksums"]

    async def close(self) -> None:
        self._parser.close()
        await self.http.close()

    async def _sample(self, request: Request, sample: int, rid: str) -> Completion:
        """One sample. One that the server gave up before its first token is asked for again: nothing was written."""
        bare = dataclasses.replace(request, prompt=_NO_PROMPT)  # a parsing process has no use for it
        for _ in range(self.http.server.retries + 1):
            async with self._slots:
                body = generate_body(request, sample, rid, self.options.limits, self._adapter)
                asked = self._asked(bare, rid, len(request.prompt), self.options.limits.new_tokens(request))
                answer = await self._generate(rid, body, f"request {request.id}")
                completion = await self._parser.parse(answer, asked)
            if completion is not None:
                return completion
            if rid in self._aborted:
                break
        raise EngineError(f"{self.name} aborted request {request.id} before its first token", reason="aborted")

    def _asked(self, bare: Request, rid: str, prompt_tokens: int, new_tokens: int) -> Asked:
        limits = self.options.limits
        version = None if self._adapter is None else self.version
        return Asked(
            bare, rid, prompt_tokens, new_tokens, limits.vocab_size, limits.head_size, limits.stop_ids, version
        )

    async def _score(self, tokens: np.ndarray, start: int, head_size: int) -> Scored:
        rid, version = new_rid(), self.version
        async with self._slots:
            body = score_body(tokens, start, rid, head_size, self._adapter)
            adapted = self._adapter is not None
            answer = await self._generate(rid, body, f"scoring of {len(tokens)} tokens")
        scored = parse_score(answer, tokens, start, head_size, self.options.limits.vocab_size, rid)
        return dataclasses.replace(scored, version=version) if adapted else scored

    async def _generate(self, rid: str, body: bytes, what: str) -> bytes:
        self._sent.add(rid)
        try:
            return await self.http.post("/generate", body, timeout_s=self.options.request_timeout_s)
        except HttpError as error:
            if error.status != 400:
                raise
            if "lora" in error.said.lower():  # the engine lacks what it should have; another one may have it
                raise EngineError(f"{self.name}, {what}: {error.said}", reason="adapter") from error
            raise RequestRefused(f"{what}: {self.name} refuses it: {error.said}") from error
        finally:
            self._sent.discard(rid)

    async def _abort(self, samples: Sequence[asyncio.Task[Completion]], rids: Sequence[str]) -> Partial:
        """End the samples; what each has written, as far as the server says so in time."""
        sent = [rid for sample, rid in zip(samples, rids, strict=True) if not sample.done() and rid in self._sent]
        waiting = [sample for sample, rid in zip(samples, rids, strict=True) if rid in sent]
        self._aborted.update(sent)
        try:
            # Without an answer in time the connections are closed, which a server that lives takes for an abort, too.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    calls = (self.http.command("/abort_request", {"rid": rid}, timeout_s=ABORT_S) for rid in sent)
                    await asyncio.gather(*calls)
                    await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            self._aborted.difference_update(sent)
            for sample in samples:
                if not sample.done():
                    abandon(sample)
        return tuple(_result(sample) for sample in samples)


def _result(sample: asyncio.Task[Completion]) -> Completion | None:
    ended = sample.done() and not sample.cancelled() and sample.exception() is None
    return sample.result() if ended else None
