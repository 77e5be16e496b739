"""Where answers are parsed: a small one at once, a big one in another process, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from rlx.envs.workers import Worker, WorkerDied, WorkerTimeout
from rlx.rollout.engine import Completion, EngineError
from rlx.rollout.sglang_responses import Asked, parse_completion

TIMEOUT_S = 120.0  # for one answer

# A worker's function must return what it raises: (message, reason).
Outcome = Completion | tuple[str, str] | None


def parse_or_explain(body: bytes, asked: Asked) -> Outcome:
    """`parse_completion` as a value."""
    try:
        return parse_completion(body, asked)
    except EngineError as error:
        return str(error), error.reason


class Parser:
    """Parses answers of `threshold` bytes and more in one of `processes` processes, others where it is called.

    threshold: 0 = all of them in a process. processes: 0 = none of them.
    """

    def __init__(self, processes: int, threshold: int):
        self._threshold = threshold
        # What is imported is no garbage: collections in the process need not look at it.
        self._workers = [Worker(parse_or_explain, gc.freeze) for _ in range(processes)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(processes, "sglang-parser") if processes else None
        self.elsewhere = 0  # answers that a process parsed

    async def parse(self, body: bytes, asked: Asked) -> Completion | None:
        """Raises EngineError."""
        if self._threads is None or len(body) < self._threshold:
            return parse_completion(body, asked)
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, self._call, body, asked)
        self.elsewhere += 1
        if isinstance(outcome, tuple):
            raise EngineError(outcome[0], reason=outcome[1])
        return outcome

    def close(self) -> None:
        """End the processes; what they are parsing is lost."""
        for worker in self._workers:
            worker.interrupt()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _call(self, *arguments: Any) -> Outcome:
        """As many threads as processes: each finds a free one."""
        worker = self._free.get()
        try:
            return worker.call(*arguments, timeout_s=TIMEOUT_S)
        except (WorkerDied, WorkerTimeout) as error:
            return f"the answer was not parsed: {error}", "parser"
        finally:
            self._free.put(worker)
