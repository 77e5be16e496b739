"""Sandboxes and a browser for tests of web projects."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from typing import Literal

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.envs.web.browser import Chromium
from rlx.envs.web.project import Project, Workshop, read_projects
from rlx.sandbox.pool import Sandboxes
from tests import browser

LIMITS = SandboxLimits(
    wall_s=30.0,
    cpu_s=30.0,
    cores=1.0,
    memory_bytes=256 << 20,
    processes=32,
    file_bytes=8 << 20,
    disk_bytes=16 << 20,
    files=1000,
    output_bytes=1 << 20,
)


def sandboxes(kind: Literal["bubblewrap", "subprocess"] = "bubblewrap", max_running: int = 0) -> Sandboxes:
    return Sandboxes(SandboxConfig(kind, 16, max_running, "", (), "", "", LIMITS))


@contextlib.asynccontextmanager
async def workshop(
    *projects: Project, kind: Literal["bubblewrap", "subprocess"] = "bubblewrap"
) -> AsyncIterator[Workshop]:
    """With `projects`, or those of the repository."""
    browser.require()
    async with sandboxes(kind) as opened, Chromium(isolated=kind == "bubblewrap") as chromium:
        yield Workshop({p.name: p for p in projects or read_projects()}, opened, chromium, 30.0)


def tar(files: Mapping[str, bytes]) -> bytes:
    """Files as a snapshot."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
