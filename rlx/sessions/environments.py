"""The environments of a run: for each task the one that its source names, with what they share.

async with Environments(config, tokenizer, graders) as environments:
    groups = await collect(engine, environments, tasks, sampling)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlx.config.chat_checks import several_turns
from rlx.config.schema import Config
from rlx.envs.chat import ChatTokenizer
from rlx.envs.code.env import CodeEnv
from rlx.envs.code.grading import CodeGrader
from rlx.envs.conversation import Conversation, open_conversation
from rlx.envs.env import Env
from rlx.envs.graders import GraderPool
from rlx.envs.grading import Grade
from rlx.envs.python_tool import PYTHON, PythonTool
from rlx.envs.web.project import WebProject
from rlx.envs.web.tasks import ENVIRONMENT as WEB_PROJECT
from rlx.rollout.session import Environment, questions
from rlx.rollout.tool_session import ToolSession
from rlx.sandbox.base import Sandbox
from rlx.sandbox.pool import Sandboxes
from rlx.sessions.web import Cuts, WebSessions
from rlx.types import Task

if TYPE_CHECKING:
    from rlx.sessions.agents import AgentSessions

AGENT = "agent"  # the environment of sessions that an outside program leads
TOOLS = {
    "python_tool": (PYTHON,),
    "code": CodeEnv.tools,
    WEB_PROJECT: WebProject.tools,
}  # of the environments that hold a conversation


def conversations(config: Config, tokenizer: ChatTokenizer) -> dict[str, Conversation]:
    """By environment, of those that sources use and whose sessions have several turns.

    Raises ValueError where the chat template does not keep what was said.
    """
    used = dict.fromkeys(config.tasks.sources[name].environment for name in several_turns(config))
    return {name: open_conversation(tokenizer, config.tools.format, TOOLS[name]) for name in used if name in TOOLS}


def openings(config: Config, tokenizer: ChatTokenizer) -> Callable[[Task], np.ndarray]:
    """The prompt that a session of a task begins with, int32 [P]. Raises what `conversations` does."""
    known, sources = conversations(config, tokenizer), config.tasks.sources
    cuts = Cuts(config, known[WEB_PROJECT]) if WEB_PROJECT in known else None

    def opening(task: Task) -> np.ndarray:
        environment = sources[task.source].environment
        if cuts is not None and (cut := cuts.of(task)) is not None:
            return cut.tokens
        if environment in known:
            return known[environment].opening(task.question)
        return tokenizer.encode_prompt(task.question)

    return opening


class Environments:
    """Called with a task it makes the environment of one session. An asynchronous context manager, of one event loop:
    leaving it closes every sandbox.

    Raises ValueError where the chat template does not keep what was said; entering it raises SandboxError or
    BrowserMissing where one is needed and there is none.
    """

    def __init__(self, config: Config, tokenizer: ChatTokenizer, graders: GraderPool):
        self._config, self._tokenizer, self._graders = config, tokenizer, graders
        self._question = questions(graders, tokenizer)
        self._conversations = conversations(config, tokenizer)
        self._sandboxes = Sandboxes(config.sandbox) if self._conversations else None
        self._code_grader = CodeGrader(self._open_sandbox, config.tools.call_seconds)
        self._web: WebSessions | None = None
        if self._sandboxes is not None and WEB_PROJECT in self._conversations:
            self._web = WebSessions(config, self._sandboxes, self._conversations[WEB_PROJECT])
        used = {source.environment for source in config.tasks.sources.values()}
        self._agents: AgentSessions | None = None
        if AGENT in used:
            from rlx.sessions.agents import AgentSessions  # here: its HTTP server takes a tenth of a second

            self._agents = AgentSessions(config, tokenizer, graders)
        self._opened = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Environments:
        async with contextlib.AsyncExitStack() as opened:
            for part in (self._sandboxes, self._web, self._agents):
                if part is not None:
                    await opened.enter_async_context(part)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._opened.aclose()

    def __call__(self, task: Task) -> Environment:
        environment = self._config.tasks.sources[task.source].environment
        if self._agents is not None and environment == AGENT:
            return self._agents.session(task)
        if environment not in self._conversations:
            return self._question(task)
        if self._web is not None and environment == WEB_PROJECT:
            return self._web.session(task)
        tools = self._config.tools
        return ToolSession(self._env(environment, task), self._conversations[environment], tools)

    def _env(self, environment: str, task: Task) -> Env:
        call_seconds = self._config.tools.call_seconds
        if environment == "code":
            return CodeEnv(task, self._code_grader, self._open_sandbox, call_seconds)
        return PythonTool(task, self._grade, self._open_sandbox, call_seconds)

    async def _grade(self, task: Task, answer: str) -> Grade:
        return await asyncio.wrap_future(self._graders.grade(task, answer))

    async def _open_sandbox(self, files: Mapping[str, bytes]) -> Sandbox:
        assert self._sandboxes is not None  # there is a source with sessions of several turns
        return await self._sandboxes.open(files=files)

    @property
    def open_sandboxes(self) -> int:
        return 0 if self._sandboxes is None else self._sandboxes.open_now

    def describe(self) -> dict[str, Any]:
        """What protects this machine from programs; {} where none are run."""
        return {} if self._sandboxes is None else self._sandboxes.describe()


class Loop(Protocol):
    """`rlx.interrupt.Preemption`, or another that has a loop."""

    def finish[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end."""
        ...


@contextlib.contextmanager
def entered(environments: Environments, loop: Loop) -> Iterator[Environments]:
    """`environments`, open on the loop of a run. What does not protect this machine from programs is said on stderr."""
    loop.finish(environments.__aenter__())
    unprotected = [what for what, how in environments.describe().items() if "NOT PROTECTED" in how]
    if unprotected:
        print(
            f"sandbox.kind: programs are not isolated; not protected: {', '.join(unprotected)} (docs/sandboxes.md)",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield environments
    finally:
        loop.finish(environments.__aexit__(None, None, None))
