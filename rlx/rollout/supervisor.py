"""Servers of this machine that are started again when they end by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rlx.rollout import servers
from rlx.rollout.servers import Server, ServerFailed, ServerSpec

POLL_S = 0.5


class Group:
    """Servers that live as long as the context does; inside it they may still be starting.

    Raises ServerFailed on entry where one cannot be started.
    """

    def __init__(self, specs: Sequence[ServerSpec], backoff_s: float):
        self.specs, self.backoff_s = list(specs), backoff_s
        self.servers: list[Server] = []
        self.restarts = 0

    def __enter__(self) -> Group:
        try:
            for spec in self.specs:
                self.servers.append(servers.start(spec))
        except BaseException:
            servers.stop(self.servers)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        servers.stop(self.servers)

    @property
    def urls(self) -> list[str]:
        return [spec.url for spec in self.specs]

    async def keep(self, index: int, ended: Callable[[str], None], again: Callable[[], None] | None = None) -> None:
        """Starts the server of this index again whenever it has ended.

        `ended` is told first, with its last words, `again` when a new process is there; it is starting then.

        The first time at once, then after waits that double: one that cannot start should not take the machine.
        """
        failures = 0
        while True:
            await asyncio.sleep(POLL_S)
            server = self.servers[index]
            if (status := server.process.poll()) is None:
                if failures and await asyncio.to_thread(servers.is_healthy, server.url):
                    failures = 0
                continue
            with _said(ended):
                log = server.spec.log
                ended(f"the server ended with status {status}; the last lines of {log}:\n{servers.last_lines(log)}")
            with _said(ended):
                await asyncio.to_thread(servers.stop, [server])  # its own processes may be left
            if failures:
                await asyncio.sleep(self.backoff_s * 2 ** min(failures - 1, 6))
            failures += 1
            with _said(ended):
                self.servers[index] = servers.start(server.spec)
                self.restarts += 1
                if again is not None:
                    again()


@contextmanager
def _said(ended: Callable[[str], None]) -> Iterator[None]:
    """What fails is told, and tried again with the next start: a full disk must not end the supervision."""
    try:
        yield
    except (ServerFailed, OSError) as error:
        ended(str(error))
