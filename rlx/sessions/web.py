"""Sessions with web projects, from their beginning or from a cut: what the sources of a run share for them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from rlx.config.schema import Config
from rlx.envs.conversation import Conversation
from rlx.envs.grading import partial_credit
from rlx.envs.web.browser import Chromium
from rlx.envs.web.project import Project, WebProject, Workshop, project_task
from rlx.envs.web.tasks import ENVIRONMENT, WebTasks
from rlx.rollout.cuts import Cut, CutRefused, CutSession, CutStore
from rlx.rollout.session import Environment
from rlx.rollout.tool_session import ToolSession
from rlx.sandbox.pool import Sandboxes
from rlx.types import Task


class WebSessions:
    """An asynchronous context manager around the browser of the checks.

    Raises BrowserMissing when it is entered and there is none.
    """

    def __init__(self, config: Config, sandboxes: Sandboxes, conversation: Conversation):
        self._tools, self._conversation = config.tools, conversation
        self._browser = Chromium(isolated=config.sandbox.kind == "bubblewrap")
        self._shops = {
            name: Workshop(projects, sandboxes, self._browser, config.tools.call_seconds)
            for name, projects in _projects(config).items()
        }
        self._cuts = Cuts(config, conversation)

    async def __aenter__(self) -> WebSessions:
        await self._browser.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._browser.__aexit__(*exception)

    def project(self, task: Task) -> Project:
        return self._shops[task.source].projects[task.metadata["project"]]

    def env(self, task: Task) -> WebProject:
        return WebProject(task, self._shops[task.source], partial_credit=partial_credit(task))

    def session(self, task: Task) -> Environment:
        env = self.env(task)
        session = ToolSession(env, self._conversation, self._tools)
        cut = self._cuts.of(task)
        return session if cut is None else CutSession(session, env, cut)


class Cuts:
    """The cuts that tasks start at, read once each."""

    def __init__(self, config: Config, conversation: Conversation):
        sources = config.tasks.sources.items()
        options = {name: WebTasks.read(s.options) for name, s in sources if s.environment == ENVIRONMENT}
        self._stores = {name: CutStore(Path(given.cuts)) for name, given in options.items() if given.cuts}
        self._fingerprint = fingerprint(conversation)
        self._get = functools.cache(self._read)

    def of(self, task: Task) -> Cut | None:
        """Raises CutRefused for one that is damaged or of another tokenizer."""
        digest = task.metadata.get("cut")
        return None if digest is None else self._get(task.source, digest)

    def _read(self, source: str, digest: str) -> Cut:
        cut = self._stores[source].get(digest)
        if cut.tokenizer != self._fingerprint:
            why = "was recorded with another tokenizer, chat template, or tools.format"
            raise CutRefused(f"cut {cut.name} {why}: record it again (rlx cuts record)")
        return cut


def fingerprint(conversation: Conversation) -> str:
    """Of what makes a conversation's ids: the vocabulary, and how turns and tools are written."""
    chat = conversation.chat
    vocabulary = sorted(chat.tokenizer.get_vocab().items())
    rendered = (conversation.opening("question").tolist(), conversation.before, conversation.after, conversation.form)
    return hashlib.sha256(repr((vocabulary, rendered)).encode()).hexdigest()


def whole_tasks(config: Config) -> list[Task]:
    """Every project of the recipe's sources from its first step to its last."""
    return [
        project_task(name, project) for name, projects in _projects(config).items() for project in projects.values()
    ]


def _projects(config: Config) -> dict[str, dict[str, Project]]:
    sources = config.tasks.sources.items()
    web = {name: WebTasks.read(s.options) for name, s in sources if s.environment == ENVIRONMENT}
    return {name: {project.name: project for project in given.chosen()} for name, given in web.items()}
