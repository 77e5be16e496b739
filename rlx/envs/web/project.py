"""Small web sites to be built in a sandbox, step by step; hidden checks in a browser grade the result.

A project is a TOML file: `start` (files), and steps of an `instruction`, `check`s (`rlx.envs.web.checks`) and a
reference `solution` (files that replace those before). A step is over when the policy says something without calling a
tool. Checks are read by the grader alone, after the session's end, from a snapshot of the workspace: they never enter
it.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rlx.envs.env import Step, Tool, ToolCall
from rlx.envs.grading import Grade, Outcome
from rlx.envs.python_tool import report
from rlx.envs.web.browser import BrowserBroken, Chromium
from rlx.envs.web.checks import Check, Checked, run_checks
from rlx.envs.web.site import SERVER, site_of
from rlx.sandbox.base import Execution, Sandbox, SandboxError, WorkspaceError
from rlx.sandbox.pool import Sandboxes
from rlx.types import Task

PROJECTS = Path(__file__).parent / "projects"
GRADER = "web_project"
SHOWN_FAILURES = 3
FAULTS = (SandboxError, BrowserBroken)  # not of the workspace, where they are no WorkspaceError
TOLD = (WorkspaceError, FileNotFoundError, ValueError)  # what a call got wrong: a place, a full workspace, a NUL

INTRODUCTION = """You are building a small web site in a workspace, in {steps}: plain HTML, CSS and JavaScript,
{server}. Keep the element ids that the instructions name. Files: {files}.

Step {number}: {instruction}

Use the tools. When the step is done, say so without calling a tool."""
NEXT = "Step {number}: {instruction}"
WITH_SERVER = f"and a Python server: `python3 {SERVER}`, standard library alone, on 127.0.0.1, its port in $PORT"
WITHOUT_SERVER = "no server; the page is index.html"

TOOLS = (
    Tool("list_files", "List the files of the workspace.", {}),
    Tool("read_file", "Read a file.", {"path": "relative path"}),
    Tool("write_file", "Write a file, replacing what was there.", {"path": "relative path", "content": "its text"}),
    Tool(
        "replace",
        "Replace a piece of text that occurs exactly once in a file.",
        {"path": "relative path", "old": "the text", "new": "what comes in its place"},
    ),
    Tool("run", "Run a shell command in the workspace.", {"command": "for sh -c"}),
)


@dataclasses.dataclass(frozen=True)
class ProjectStep:
    instruction: str
    checks: tuple[Check, ...]
    solution: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Project:
    name: str
    start: Mapping[str, str]
    steps: tuple[ProjectStep, ...]

    def solved(self, steps: int) -> dict[str, bytes]:
        """The files of the reference after so many steps."""
        files = dict(self.start)
        for step in self.steps[:steps]:
            files |= step.solution
        return {path: text.encode() for path, text in files.items()}


def read_project(file: Path) -> Project:
    """Raises ValueError for a file that is no project."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        steps = tuple(
            ProjectStep(s["instruction"].strip(), tuple(map(Check.read, s["check"])), s.get("solution", {}))
            for s in given["step"]
        )
        return Project(file.stem, given["start"], steps)
    except (KeyError, TypeError, AttributeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file} is no web project: {type(error).__name__} {error}") from error


def read_projects(directory: Path = PROJECTS) -> list[Project]:
    """Those of a directory, by name. Raises ValueError, also where there are none."""
    files = sorted(directory.glob("*.toml"))
    if not files:
        raise ValueError(f"there are no web projects (*.toml) in {directory}")
    return [read_project(file) for file in files]


def project_task(source: str, project: Project, first: int = 0, end: int | None = None) -> Task:
    """Steps [first, end) of a project as one task; all of them by default. `first` > 0 needs a cut to start from."""
    end = len(project.steps) if end is None else end
    whole = (first, end) == (0, len(project.steps))
    name = project.name if whole else f"{project.name}/{first + 1}-{end}"
    metadata = {"project": project.name, "first": first, "end": end}
    return Task(f"{source}/{name}", source, introduction(project, first, end), None, GRADER, metadata)


def introduction(project: Project, first: int, end: int) -> str:
    count = end - first
    return INTRODUCTION.format(
        steps="one step" if count == 1 else f"{count} steps",
        server=WITH_SERVER if SERVER in project.start else WITHOUT_SERVER,
        files=", ".join(sorted(project.start)),
        number=first + 1,
        instruction=project.steps[first].instruction,
    )


@dataclasses.dataclass(frozen=True)
class Workshop:
    """What sessions with web projects share."""

    projects: Mapping[str, Project]
    sandboxes: Sandboxes
    browser: Chromium
    call_seconds: float  # that a command may take


class WebProject:
    """An `rlx.envs.env.Env`: the steps of a project's task, one after the other."""

    tools = TOOLS

    def __init__(self, task: Task, shop: Workshop, *, partial_credit: bool = True):
        self._task, self._shop, self._partial = task, shop, partial_credit
        self._project = shop.projects[task.metadata["project"]]
        self.step_number: int = task.metadata["first"]  # of the step that is worked on, from 0
        self._sandbox: Sandbox | None = None
        self._result: bytes | None = None  # the workspace at the session's end

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None
        return self._sandbox

    async def reset(self) -> str:
        """The workspace as the project starts, whichever step the task begins with."""
        files = {path: text.encode() for path, text in self._project.start.items()}
        self._sandbox = await self._shop.sandboxes.open(files=files)
        return introduction(self._project, self._task.metadata["first"], self._task.metadata["end"])

    async def snapshot(self) -> bytes:
        return await self.sandbox.snapshot()

    async def resume(self, step: int, snapshot: bytes) -> None:
        """In place of `reset`: the workspace as it was when step `step` began."""
        self.step_number = step
        self._sandbox = await self._shop.sandboxes.open()
        await self._sandbox.restore(snapshot)

    async def step(self, action: str | ToolCall) -> Step:
        if isinstance(action, ToolCall):
            try:
                if action.tool == "run":
                    execution = await self._run(action.arguments["command"])
                    return Step(report(execution), seconds=execution.seconds)
                return Step(await self._use(action.tool, **action.arguments))
            except TOLD as error:
                return Step(f"error: {error}")
        self.step_number += 1
        if self.step_number >= self._task.metadata["end"]:
            return Step("", done=True)
        instruction = self._project.steps[self.step_number].instruction
        return Step(NEXT.format(number=self.step_number + 1, instruction=instruction))

    async def grade(self) -> Grade:
        """A browser or a sandbox that fails is asked once more; then there is no verdict, `Outcome.ERROR`."""
        start = time.perf_counter()
        try:
            done = await self._check_again_after_a_failure()
        except WorkspaceError as error:  # which is the session's doing
            detail = f"the workspace cannot be judged: {error}"
            return Grade(0.0, "", detail, time.perf_counter() - start, Outcome.GRADED)
        except FAULTS as error:
            detail = f"{type(error).__name__}: {error}"
            return Grade(0.0, "", detail, time.perf_counter() - start, Outcome.ERROR)
        passed = sum(c.passed for c in done)
        share = passed / len(done)
        reward, seen = share if self._partial else float(share == 1.0), f"{passed} of {len(done)} checks"
        return Grade(reward, seen, _failures(done), time.perf_counter() - start, Outcome.GRADED)

    async def _check_again_after_a_failure(self) -> list[Checked]:
        try:
            return await check_steps(self._shop, await self._end(), self._steps())
        except WorkspaceError:
            raise
        except FAULTS:
            return await check_steps(self._shop, await self._end(), self._steps())

    async def _end(self) -> bytes:
        """The workspace, whose sandbox gives its place to those of the checks."""
        if self._result is None:
            self._result = await self.sandbox.snapshot()
            await self.sandbox.close()
        return self._result

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    def _steps(self) -> tuple[ProjectStep, ...]:
        return self._project.steps[self._task.metadata["first"] : self._task.metadata["end"]]

    async def _run(self, command: str) -> Execution:
        return await self.sandbox.run(["sh", "-c", command], timeout_s=self._shop.call_seconds)

    async def _use(self, tool: str, **arguments: str) -> str:
        match tool, arguments:
            case "list_files", {}:
                return _readable("\n".join(await self.sandbox.list()))
            case "read_file", {"path": path}:
                return (await self.sandbox.read(path)).decode(errors="replace")
            case "write_file", {"path": path, "content": content}:
                await self.sandbox.write(path, content.encode(errors="replace"))
                return f"wrote {path}"
            case "replace", {"path": path, "old": old, "new": new}:
                return await self._replace(path, old, new)
        raise ValueError(f"there is no tool {tool!r} with {sorted(arguments)}")

    async def _replace(self, path: str, old: str, new: str) -> str:
        text = (await self.sandbox.read(path)).decode(errors="replace")
        count = text.count(old) if old else 0
        if count != 1:
            return f"error: the text occurs {count} times in {path}; it must occur once"
        await self.sandbox.write(path, text.replace(old, new).encode(errors="replace"))
        return f"replaced in {path}"


async def check_steps(shop: Workshop, snapshot: bytes, steps: Sequence[ProjectStep]) -> list[Checked]:
    """Raises SandboxError and BrowserBroken: no verdict on the workspace."""
    checks = [check for step in steps for check in step.checks]
    async with shop.browser.turns:
        return await run_checks(shop.browser, partial(site_of, snapshot, shop.sandboxes), checks)


def _readable(text: str) -> str:
    """Without the halves of surrogate pairs that names of files have which are no UTF-8."""
    return text.encode(errors="replace").decode()


def _failures(done: list[Checked]) -> str:
    failed = [f"{c.name}: {c.detail}" for c in done if not c.passed]
    more = f"; {len(failed) - SHOWN_FAILURES} more" if len(failed) > SHOWN_FAILURES else ""
    return "; ".join(failed[:SHOWN_FAILURES]) + more


def reference(project: Project, first: int, end: int) -> list[list[ToolCall] | str]:
    """A pass over steps [first, end): each response is a list of calls, or what is said when a step is done."""
    said: list[list[ToolCall] | str] = []
    for step in project.steps[first:end]:
        said += [
            [ToolCall("write_file", {"path": path, "content": text}) for path, text in step.solution.items()],
            "The step is done.",
        ]
    return said


def tasks_of(source: str, projects: list[Project]) -> list[Task]:
    """Each project as one task."""
    return [project_task(source, project) for project in projects]
