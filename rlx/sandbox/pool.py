"""The sandboxes of a run: opened and closed by sessions, so many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox.base import Execution, Provider, Sandbox
from rlx.sandbox.local import LocalSandboxes


class Sandboxes:
    """An asynchronous context manager, of one event loop:

        async with Sandboxes(config.sandbox) as sandboxes:
            sandbox = await sandboxes.open(files={"main.py": b"print(1)"})
            try:
                execution = await sandbox.run(["python3", "main.py"])
            finally:
                await sandbox.close()

    Leaving it closes every sandbox. No more than `max_open` are open, no more than `max_running` commands run at
    once; the others wait, which counts for no limit of theirs.

    Entering it raises SandboxError where sandboxes of the configured kind cannot be made, saying what to do.
    """

    def __init__(self, config: SandboxConfig, provider: Provider | None = None):
        self.config = config
        self._provider = provider_of(config) if provider is None else provider
        self._places = asyncio.Semaphore(config.max_open)
        self._turns = asyncio.Semaphore(config.max_running or 2 * len(os.sched_getaffinity(0)))
        self._open: set[_Pooled] = set()

    async def __aenter__(self) -> Sandboxes:
        await self._provider.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            closed = await asyncio.gather(*(sandbox.close() for sandbox in self._open), return_exceptions=True)
        finally:
            await self._provider.close()
        for error in closed:
            if error is not None:
                raise error

    async def open(
        self,
        limits: SandboxLimits | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        at_once: bool = False,
    ) -> Sandbox:
        """A new sandbox.

        Args:
          limits: others than the configured ones. files: what its workspace has.
          at_once: its commands wait for no turn. Whoever asks for it bounds how many there are.
        Raises:
          SandboxError, PathError.
        """
        await self._places.acquire()
        try:
            sandbox = _Pooled(self, await self._provider.open(limits or self.config.limits), at_once=at_once)
        except BaseException:
            self._places.release()
            raise
        self._open.add(sandbox)
        try:
            for path, data in (files or {}).items():
                await sandbox.write(path, data)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def describe(self) -> dict[str, str]:
        """What protects from what."""
        return self._provider.describe()

    @property
    def open_now(self) -> int:
        return len(self._open)

    @property
    def turns(self) -> asyncio.Semaphore:
        """Who holds it may run a command."""
        return self._turns

    def forget(self, sandbox: _Pooled) -> None:
        self._open.discard(sandbox)
        self._places.release()


class _Pooled:
    """A sandbox that waits for its turn to run and gives its place back when it is closed."""

    def __init__(self, pool: Sandboxes, inner: Sandbox, *, at_once: bool):
        self._pool, self._inner = pool, inner
        self._closing: asyncio.Task[None] | None = None
        self._turn: AbstractAsyncContextManager[None] = contextlib.nullcontext() if at_once else pool.turns
        self.write, self.read, self.list = inner.write, inner.read, inner.list
        self.snapshot, self.restore = inner.snapshot, inner.restore

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Execution:
        async with self._turn:
            return await self._inner.run(command, stdin=stdin, timeout_s=timeout_s, env=env)

    async def close(self) -> None:
        """Goes on where whoever waits for it is cancelled: its place is free when it is gone."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._inner.close()
        finally:
            self._pool.forget(self)


def provider_of(config: SandboxConfig) -> Provider:
    if config.kind != "daytona":
        return LocalSandboxes(config)
    from rlx.sandbox.daytona import DaytonaSandboxes  # here: its HTTP client takes a tenth of a second

    return DaytonaSandboxes(config)
