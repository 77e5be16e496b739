"""An agent that somebody else wrote as the session of a training run.

The agent gets an address and a key, and talks to them as to OpenAI's API. What it asks becomes the session's next
observation, what the run's engines write goes back as the answer: the producer owns the tokens, as in any session. A
session is one sequence of ids, so an agent that rewrites history is refused here; `rlx serve` records such sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from rlx.agents.conversation import ClientConversation, Format
from rlx.agents.endpoint import Endpoint
from rlx.agents.openai import ChatRequest, Reply, RequestInvalid
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import StopReason, Task

GRACE_S = 5.0  # for an agent to end by itself once its session is over


@dataclasses.dataclass(frozen=True)
class Place:
    """What an agent is given: OPENAI_BASE_URL, OPENAI_API_KEY and its task."""

    base_url: str
    api_key: str
    task: Task


Agent = Callable[[Place], Awaitable[str]]  # its result: what is judged beside the transcript
Judge = Callable[[Task, str, Transcript], Awaitable[Verdict]]


class AgentFailed(RuntimeError):
    """The agent ended with an error or without ever asking, or told the past otherwise than it was."""


def command_agent(command: Sequence[str]) -> Agent:
    """A program as the agent: the question on stdin, its result on stdout.

    It sees OPENAI_BASE_URL, OPENAI_API_KEY and RLX_TASK_ID beside this process's environment, and is killed as a whole
    group. It runs unprotected: what its tools execute is for itself to isolate.
    """

    async def run(place: Place) -> str:
        own = {"OPENAI_BASE_URL": place.base_url, "OPENAI_API_KEY": place.api_key, "RLX_TASK_ID": place.task.id}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | own,
            start_new_session=True,
        )
        try:
            said, errors = await process.communicate(place.task.question.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise AgentFailed(f"{command[0]} ended with status {process.returncode}: {''.join(last)}")
        return said.decode(errors="replace")

    return run


@dataclasses.dataclass(eq=False)
class _Asked:
    request: ChatRequest
    prompt_tokens: int
    reply: asyncio.Future[Reply]


class OutsideAgent:
    """An `rlx.rollout.session.Environment` whose words are the requests of an agent; an `Answerer` of the endpoint.

    Raises AgentFailed in reset and step.
    """

    def __init__(self, task: Task, endpoint: Endpoint, form: Format, agent: Agent, judge: Judge):
        self._task, self._endpoint, self._agent, self._judge = task, endpoint, agent, judge
        self._form, self._conversation = form, ClientConversation(form)
        self._key = ""
        self._running: asyncio.Task[str] | None = None
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self._open: _Asked | None = None  # what the policy is answering
        self._length = 0  # tokens so far

    async def reset(self) -> np.ndarray:
        self._key = self._endpoint.open(self)
        place = Place(self._endpoint.base_url(self._key), self._key, self._task)
        self._running = asyncio.ensure_future(self._agent(place))
        observation = await self._next()
        if observation is None:
            raise AgentFailed(f"task {self._task.id}: the agent ended without asking anything")
        return observation

    async def step(self, response: np.ndarray) -> np.ndarray | None:
        asked = self._open
        assert asked is not None
        message = self._conversation.said(asked.request, response)
        stop = StopReason.STOP if self._form.ended(response) else StopReason.LENGTH
        self._length += len(response)
        self._open = None
        asked.reply.set_result(Reply(message, stop, asked.prompt_tokens, len(response)))
        return await self._next()

    async def grade(self, transcript: Transcript) -> Verdict:
        """Also of a session that a limit stopped: its agent is told so, and has a few seconds to end."""
        return await self._judge(self._task, await self._outcome(), transcript)

    async def close(self) -> None:
        """The agent ends now."""
        self._endpoint.close(self._key)
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait((self._running,))
        self._refuse("session_over", "the session is over")

    async def answer(self, request: ChatRequest) -> Reply:
        asked = _Asked(request, 0, asyncio.get_running_loop().create_future())
        await self._asked.put(asked)
        return await asked.reply

    async def _next(self) -> np.ndarray | None:
        """The agent's next request as an observation; None where the agent has ended."""
        assert self._running is not None
        asking = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait((asking, self._running), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self._result()
                return None
            asked = asking.result()
        finally:
            asking.cancel()
        return self._observe(asked)

    def _observe(self, asked: _Asked) -> np.ndarray:
        try:
            told = self._conversation.told(asked.request)
            if told.rewritten is not None:
                raise RequestInvalid(f"messages[{told.rewritten}] is not what was said before", "history_rewritten")
        except RequestInvalid as error:
            asked.reply.set_exception(error)
            raise AgentFailed(f"task {self._task.id}: {error}; a session is one conversation") from error
        self._length += len(told.tokens)
        asked.prompt_tokens = self._length
        self._open = asked
        return told.tokens

    def _result(self) -> str:
        assert self._running is not None
        try:
            return self._running.result()
        except Exception as error:
            raise AgentFailed(f"task {self._task.id}: the agent failed: {type(error).__name__}: {error}") from error

    async def _outcome(self) -> str:
        """The agent's result; "" where the session was stopped and it did not end well by itself."""
        assert self._running is not None
        if self._open is None:
            return self._result()
        self._endpoint.close(self._key)
        self._refuse("context_length_exceeded", "the session has reached its limit of tokens")
        done, _ = await asyncio.wait((self._running,), timeout=GRACE_S)
        ended_well = done and not self._running.cancelled() and self._running.exception() is None
        return self._running.result() if ended_well else ""

    def _refuse(self, code: str, message: str) -> None:
        """What still waits for an answer gets none."""
        waiting = [] if self._open is None else [self._open]
        while not self._asked.empty():
            waiting.append(self._asked.get_nowait())
        for asked in waiting:
            if not asked.reply.done():
                asked.reply.set_exception(RequestInvalid(message, code))
