"""Tasks of web projects: whole ones, or the steps after a cut of a recorded pass (`rlx cuts`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.envs.cut_index import read_index
from rlx.envs.web.project import PROJECTS, Project, project_task, read_projects
from rlx.types import Task

DATASET = "web_projects"
ENVIRONMENT = "web_project"


@dataclasses.dataclass(frozen=True)
class WebTasks:
    """The options of a source of web projects.

    projects: their names; () = all. directory: of *.toml files, "" = those of rlx.
    cuts: a directory that `rlx cuts` made: a task for each of its cuts, beside or (cuts_alone) in place of the whole
    projects. until: "end", the steps from the cut on; "step", the first of them alone.
    """

    projects: tuple[str, ...] = ()
    directory: str = ""
    cuts: str = ""
    cuts_alone: bool = False
    until: str = "end"

    def __post_init__(self) -> None:
        if self.until not in ("end", "step"):
            raise ValueError(f"until = {self.until!r}: 'end' (the steps from the cut on) or 'step' (the first of them)")
        if self.cuts_alone and not self.cuts:
            raise ValueError("cuts_alone = True needs cuts, a directory that `rlx cuts` made")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> WebTasks:
        """Raises ValueError for an option that does not exist, and what the class raises."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(f"{name} is not an option of {DATASET}; there are {', '.join(sorted(known))}")
        given = dict(options)
        return cls(**given | {"projects": tuple(given.get("projects", ()))})

    def chosen(self) -> list[Project]:
        """Raises ValueError for a project that is not there."""
        found = {
            project.name: project for project in read_projects(Path(self.directory) if self.directory else PROJECTS)
        }
        if unknown := [name for name in self.projects if name not in found]:
            raise ValueError(f"projects: there is no {unknown[0]!r}; there are {', '.join(sorted(found))}")
        return [found[name] for name in self.projects or found]

    def tasks(self, source: str) -> list[Task]:
        """Raises ValueError."""
        projects = self.chosen()
        whole = [] if self.cuts_alone else [project_task(source, project) for project in projects]
        return whole + list(self._cut_tasks(source, projects))

    def _cut_tasks(self, source: str, projects: Sequence[Project]) -> list[Task]:
        if not self.cuts:
            return []
        known = {project.name: project for project in projects}
        tasks: dict[str, Task] = {}
        for digest, place in read_index(Path(self.cuts)).items():
            project, step = known.get(place.task.partition("/")[2]), place.step  # of "source/project"
            if project is None:
                continue
            end = step + 1 if self.until == "step" else len(project.steps)
            task = project_task(source, project, step, end)
            first = tasks.get(task.id)  # of several passes the cut of the smallest digest: always the same one
            if first is None or digest < first.metadata["cut"]:
                tasks[task.id] = dataclasses.replace(task, metadata={**task.metadata, "cut": digest})
        if not tasks:
            raise ValueError(f"cuts = {self.cuts!r} has no cut of the projects that are asked for")
        return sorted(tasks.values(), key=lambda task: task.id)
