"""Sessions whose agent is a program of somebody else's: the endpoint that it talks to, and who judges its result."""

from __future__ import annotations

import asyncio

from rlx.agents.chat_format import ChatFormat
from rlx.agents.endpoint import Endpoint
from rlx.agents.openai import Sampling
from rlx.agents.outside import OutsideAgent, command_agent
from rlx.config.schema import Config
from rlx.envs.chat import ChatTokenizer
from rlx.envs.graders import GraderPool
from rlx.rollout.session import Environment
from rlx.rollout.transcript import Transcript, Verdict
from rlx.types import Task


class AgentSessions:
    """Sessions of the sources that name an agent. An asynchronous context manager around the endpoint. What an agent
    prints is graded as a response would be."""

    def __init__(self, config: Config, tokenizer: ChatTokenizer, graders: GraderPool):
        sources = config.tasks.sources.items()
        self._agents = {name: command_agent(source.agent) for name, source in sources if source.agent}
        self._graders, self._form = graders, ChatFormat(tokenizer)
        self._endpoint = Endpoint("policy", Sampling.RUN)

    async def __aenter__(self) -> AgentSessions:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._endpoint.__aexit__(*exception)

    def session(self, task: Task) -> Environment:
        return OutsideAgent(task, self._endpoint, self._form, self._agents[task.source], self._judge)

    async def _judge(self, task: Task, result: str, transcript: Transcript) -> Verdict:
        return Verdict(await asyncio.wrap_future(self._graders.grade(task, result)), result)
