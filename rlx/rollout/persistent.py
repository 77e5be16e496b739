"""A fleet that is asked once: a request that an engine fails is asked again of another one."""

from __future__ import annotations

import asyncio

from rlx.rollout.budgets import Books
from rlx.rollout.engine import Completion, EngineError, Request, RequestRefused, raise_if_cancelled
from rlx.rollout.fleet import Fleet


class Persistent:
    """An `Engine` for collections and evaluations, whose requests are asked anew as a whole.

    Args:
      books: gets the tokens that failed engines had written.
      retries: of one request; while no engine is in service it waits, and tries nothing.
    """

    def __init__(self, fleet: Fleet, books: Books, retries: int, backoff_s: float):
        self._fleet, self._books, self._retries, self._backoff_s = fleet, books, retries, backoff_s

    async def generate(self, request: Request) -> list[Completion]:
        """See `rlx.rollout.engine.Engine`."""
        for attempt in range(self._retries + 1):
            try:
                return await self._fleet.generate(request)
            except RequestRefused:
                raise
            except EngineError as error:
                self._book(error)
                raise_if_cancelled(error)
                if attempt == self._retries:
                    raise
            await asyncio.sleep(self._backoff_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _book(self, error: EngineError) -> None:
        tokens = sum(len(part.tokens) for part in error.partial if part is not None)
        self._books.generated(tokens)
        self._books.move("in_flight", f"failed/engine_{error.reason}", tokens)
