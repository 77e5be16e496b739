"""Concurrent sessions with a tool: the real producer, ledger, graders and sandboxes, and engines that follow a script.

    python -m bench.tool_sessions [--sessions 256] [--collections 4] [--tokenizer models/smollm2-135m-instruct]

Every session asks for a sum, has a program run in a sandbox of its own, reads what it printed and answers. An engine
takes some seconds for each response, so that all sessions are open at once, with their sandboxes. None may be lost, all
must pass, and the ledger must balance; printed are sessions a minute, CPU time a session, and sandboxes at the peak.
`python -m bench.sandboxes` measures one sandbox: its start and its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from typing import Any, NamedTuple

import numpy as np

from configs import base
from rlx.config.parse import parse
from rlx.config.schema import Config
from rlx.envs.chat import ChatTokenizer, load_chat_tokenizer
from rlx.envs.env import ToolCall
from rlx.envs.graders import GraderPool
from rlx.envs.tool_calls import write_call
from rlx.envs.tool_tasks import make_tasks
from rlx.metrics.ledger import Ledger
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling
from rlx.rollout.engine import Completion, Request
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.sessions.environments import Environments
from rlx.types import StopReason, VersionSpan

GROUP, TASKS = 8, 1000


class Script:
    """An engine: a program first, then what it printed. A response takes `seconds` on average."""

    name, version = "script", 0

    def __init__(self, chat: ChatTokenizer, questions: dict[str, str], seconds: float, admission: int):
        self._chat, self._questions, self._seconds, self.admission = chat, questions, seconds, admission

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(2 * self._seconds * request.seeds[0] / 2**32)
        _, task, _, turn, _ = request.id.split(":")
        if turn == "0":
            expression = self._questions[task].removeprefix("What is ").removesuffix("?")
            text = write_call("plain", ToolCall("python", {"code": f"print({expression})"}))
        else:
            told = self._chat.decode(request.prompt).rpartition("user\n")[2]
            text = f"It is {told.split()[0]}."
        tokens = np.append(self._chat.encode(text), self._chat.end_of_turn_id).astype(np.int32)
        spans = (VersionSpan(0, 0, len(tokens)),)
        return [Completion(tokens, np.full(len(tokens), -0.1, np.float32), None, spans, StopReason.STOP)]

    async def load(self, weights: Any, version: int, /) -> None:
        self.version = version


class Seen(NamedTuple):
    sessions: int
    passed: int
    failures: int  # of any kind, those that a retry mended included
    seconds: float
    cpu_seconds: float  # of this process and of the commands in sandboxes
    most_sandboxes: int


def configuration(tokenizer: str, kind: str) -> Config:
    c = base.get_config()
    c.model.path = tokenizer
    c.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool", size=TASKS)
    c.tools.format = "plain"
    c.sandbox.kind = kind
    c.sandbox.max_open = 500
    return parse(c)


async def run(config: Config, sessions: int, collections: int, seconds: float) -> Seen:
    """`collections` batches of as many sessions as are open at once. Raises LedgerError where the books are wrong."""
    chat = load_chat_tokenizer(config.model.path, "", "")
    tasks = make_tasks("sums", "arithmetic", {}, TASKS, 0)
    stream = enumerate(tasks * (collections * sessions // TASKS + 2))
    ledger, groups = Ledger(), sessions // GROUP
    buffer = Buffer(Rules(groups, 10**6, False, False, 10**6, False, False), ledger)
    engine = Script(chat, {task.id: task.question for task in tasks}, seconds, sessions)
    options = ProducerOptions(Budgets(sessions, 2 * sessions, groups), gradings=16)
    sampling = Sampling(GROUP, 256, 1.0, False, 0)
    began, cpu = time.monotonic(), _cpu_seconds()
    taken, most = [], 0
    with GraderPool(config.grader, ("number",)) as graders:
        async with (
            Environments(config, chat, graders) as environments,
            Fleet([engine], FleetOptions(), None, 0, ledger) as fleet,
            Producer(fleet, environments, lambda: next(stream), buffer, ledger, sampling, options) as producer,
        ):

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, environments.open_sandboxes)
                    await asyncio.sleep(0.05)

            watching = asyncio.create_task(watch())
            for _ in range(collections):
                batch = await buffer.take(0)
                taken += [sample for group in batch.groups for sample in group.samples]
                buffer.done(batch, applied=True)
                ledger.check(producer.holdings() | buffer.holdings())
            watching.cancel()
            spent = time.monotonic() - began
            failures = sum(producer.failures.values())
    passed = sum(sample.reward == 1.0 for sample in taken)
    return Seen(len(taken), passed, failures, spent, _cpu_seconds() - cpu, most)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=256, help="open at once (256)")
    parser.add_argument("--collections", type=int, default=4, help="batches of as many sessions (4)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a response, on average (5)")
    parser.add_argument("--kind", default="bubblewrap", help="of the sandboxes (bubblewrap)")
    parser.add_argument("--tokenizer", default="models/smollm2-135m-instruct", help="a model's directory")
    arguments = parser.parse_args()
    config = configuration(arguments.tokenizer, arguments.kind)
    seen = asyncio.run(run(config, arguments.sessions, arguments.collections, arguments.seconds))
    lost = arguments.sessions * arguments.collections - seen.sessions
    print(f"{seen.sessions} sessions, {lost} lost, {seen.passed} passed, {seen.failures} failures; the ledger balances")
    print(f"{seen.sessions / seen.seconds * 60:.0f} sessions a minute, at most {seen.most_sandboxes} sandboxes at once")
    print(f"{seen.cpu_seconds / seen.sessions * 1000:.0f} ms of CPU time a session, sandboxes included")


if __name__ == "__main__":
    main()
