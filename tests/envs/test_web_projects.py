"""The web projects of the repository: references pass all checks, every step has something to do; sites and graders."""

import asyncio

import pytest

from rlx.envs.web_project import (
    check_steps,
    read_projects,
)
from tests.workshop import tar, workshop

PROJECTS = {project.name: project for project in read_projects()}


def failed(checks):
    return [f"{c.name}: {c.detail}" for c in checks if not c.passed]


@pytest.mark.slow
@pytest.mark.parametrize("some", [slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)])
def test_references_pass_everything_and_no_step_is_done_before_it_is_begun(some):
    async def main():
        async with workshop() as shop:
            for project in list(PROJECTS.values())[some]:
                end = len(project.steps)
                assert failed(await check_steps(shop, tar(project.solved(end)), project.steps)) == [], project.name
                for k, step in enumerate(project.steps):
                    undone = await check_steps(shop, tar(project.solved(k)), (step,))
                    assert failed(undone), f"{project.name}: step {k + 1} asks for nothing"

    asyncio.run(main())
